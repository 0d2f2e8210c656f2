"""NaNWatch: notice a loss that is NaN or infinite, stop or skip, and keep good checkpoints good."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from hasten import messages
from hasten.errors import HastenError
from hasten.parallel.sharded import local
from hasten.trainer.callbacks.base import Callback
from hasten.trainer.callbacks.buffers import BufferCopies
from hasten.trainer.callbacks.shared import alike, finite, non_finite_flag, say

_FIX = (
    "lower the learning rate, clip gradients (gradient_clip_val=1.0), or look at that batch; NaNWatch('skip') goes on"
)


class NaNWatch(Callback):
    """Watch the loss, and the gradients if asked to, for NaN and infinity.

    One process on the CPU: every loss is read at once, since that is free there, and the poisoned step is dropped
    before it reaches the weights, whatever the action. Elsewhere losses stay on the device and are read together
    every `every_n_steps`; meanwhile the weights may be lost, but no checkpoint of them is written.

    "skip" drops each optimizer step whose gradients are not finite (the optimizer's state is untouched too). One
    built with `fused=True` skips by itself, told by a flag on the device; another one costs one read per step. Under
    `precision="16-mixed"` the gradient scaler skips already, and this only watches the loss.

    With a step that is dropped, all buffers (BatchNorm's statistics) are put back to what they were before its first
    batch, in manual optimization before this batch; for that they are copied each step.

    Args:
        action: "stop": training ends as after its last step; "raise": HastenError; "skip": see above.
        every_n_steps: Optimizer steps between two reads of the device.
        watch_gradients: Look at gradients too, before each optimizer step; "skip" does so anyway.
        patience: With "skip": stop after so many dropped steps in a row.

    Attributes:
        bad_steps: Optimizer steps (from 0) with a bad loss or gradient; the first 100.
        skipped: Optimizer steps dropped; on a GPU as of the last read.

    Raises:
        HastenError: No such action, or a number below 1; at run time with "raise".
    """

    def __init__(
        self,
        action: Literal["stop", "skip", "raise"] = "stop",
        every_n_steps: int = 50,
        watch_gradients: bool = False,
        patience: int = 20,
    ) -> None:
        if action not in ("stop", "skip", "raise"):
            raise HastenError(f"NaNWatch(action={action!r}): there is no such action", 'use "stop", "skip" or "raise"')
        if every_n_steps < 1 or patience < 1:
            raise HastenError(f"NaNWatch(every_n_steps={every_n_steps}, patience={patience})", "both are 1 or more")
        self.action = action
        self.every_n_steps = every_n_steps
        self.watch_gradients = watch_gradients
        self.patience = patience
        self.bad_steps: list[int] = []
        self.skipped = 0
        self._where = ""  # what was bad, in words; "" while all is well
        self._poisoned = False  # a bad loss went into the gradients that are being gathered
        self._wary = False  # a bad loss was seen, and it is not known which of several optimizers it concerns
        self._buffers: BufferCopies | None = None
        self._kept_buffers: list[torch.Tensor] = []  # what a checkpoint brought of them, until training starts
        self._gathers = False  # over several batches
        self._undone = False  # the buffers are put back already; a later optimizer of this batch may have gone on
        self._window_open = False  # the buffers may be put back to before this step
        self._bad_window: torch.Tensor | None = None  # on the device: 1 where a loss of this step is bad
        self._row = 0  # dropped steps in a row
        self._losses: list[tuple[int, torch.Tensor]] = []  # unread
        self._flags: list[tuple[int, torch.Tensor]] = []  # unread: 1 where gradients were bad
        self._read_step = 0
        self._reads_freely = False
        self._scaler: Any = None  # the technique that drops overflowed steps, in fp16

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Settle on how to watch, and begin with nothing found; a checkpoint that is loaded later may say otherwise."""
        self._reads_freely = trainer.device.type == "cpu" and trainer.world_size == 1
        scales = trainer.precision == "16-mixed"
        self._scaler = next((one for one in trainer.run.techniques if one.name == "precision" and scales), None)
        self._where, self._poisoned, self._wary, self._row = "", False, False, 0
        self._losses, self._flags = [], []
        self._buffers, self._kept_buffers, self._window_open, self._bad_window = None, [], False, None

    def needs(self, hook: str) -> bool:
        """Gradients are looked at if somebody asked, or where it is free to drop a poisoned step."""
        wanted = self._reads_freely or self.watch_gradients or self.action == "skip"
        if hook == "on_train_batch_start":
            return self._drops
        return hook != "on_before_optimizer_step" or wanted

    @property
    def _scaled(self) -> bool:
        """Whether overflowed steps are dropped elsewhere; a hook on a gradient, say, ends that within a training."""
        return self._scaler is not None and self._scaler.drops_overflows

    @property
    def _drops(self) -> bool:
        """Whether a step may be dropped, and training go on, or weights be kept, without it."""
        return self._reads_freely or self.action == "skip"

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Count reads from here, and find the buffers."""
        self._read_step = trainer.global_step
        self._buffers = BufferCopies(module) if self._drops else None
        if self._buffers is not None and self._kept_buffers:
            self._buffers.load_state_dict(self._kept_buffers)
            self._window_open = True

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """Find the buffers that were registered since."""
        if self._buffers is not None:
            self._buffers.look()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
        """Copy the buffers where a step begins: not in the middle of an accumulation."""
        if self._buffers is not None and (not self._window_open or not batch_idx % trainer.accumulate_grad_batches):
            self._buffers.take()
            self._gathers = trainer.accumulate_grad_batches > 1
            self._window_open, self._bad_window, self._poisoned, self._undone = True, None, False, False
        return None

    def on_before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        """Look at the loss, or keep it for later."""
        loss = loss.detach()
        if not self._reads_freely:
            loss = loss.clone()  # a captured graph would write over it
            self._losses.append((trainer.global_step, loss))
            if self._buffers is not None and (self._scaled or self._gathers):
                flag = ~torch.isfinite(loss).all()
                self._bad_window = flag if self._bad_window is None else self._bad_window | flag
        elif not math.isfinite(value := loss.item() if loss.numel() == 1 else float(loss.sum())):
            self._poisoned = self._wary = True
            self._found(trainer.global_step, f"the loss is {value}")

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Drop the step if it is poisoned."""
        if self._scaled:
            return
        several = not module.automatic_optimization  # then nobody knows which optimizer a bad loss was for
        poisoned, self._poisoned = self._poisoned and not several, self._poisoned and several
        if poisoned:
            self._drop(optimizer)
        elif self.action == "skip" or self.watch_gradients or (several and self._wary):
            self._check_gradients(trainer, module, optimizer)
        self._window_open = False

    def _check_gradients(self, trainer: Any, module: Any, optimizer: Any) -> None:
        groups = alike(p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        step = trainer.global_step
        if self._reads_freely:
            if not all(finite(group) for group in groups):
                self._found(step, f"the gradient of {_bad_names(module, of_gradients=True)} is not finite")
                self._drop(optimizer)
            else:
                self._row = 0
            return
        device = trainer.device
        flags = [non_finite_flag(group).to(device) for group in groups] or [torch.zeros((), device=device)]
        flag = torch.stack(flags).max()
        if trainer.world_size > 1:  # all ranks drop the step, or none
            flag = trainer.world.reduce(flag, "max")
        if self.action != "skip":
            self._flags.append((step, flag))
        elif getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = flag  # the fused kernel leaves weights and state as they are where this is 1
            self._flags.append((step, flag))
            if self._buffers is not None:
                self._buffers.put_back_if(flag)
        elif bool(flag):
            self._found(step, f"the gradient of {_bad_names(module, of_gradients=True)} is not finite")
            self._drop(optimizer)
        else:
            self._row = 0

    def _found(self, step: int, where: str) -> None:
        self._where = self._where or f"step {step}: {where}"
        if len(self.bad_steps) < 100 and step not in self.bad_steps[-1:]:
            self.bad_steps.append(step)

    def _drop(self, optimizer: Any) -> None:
        """Without gradients an optimizer's step does nothing, to its state neither."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        if self._buffers is not None:
            self._buffers.put_back()
            self._undone = True
        if self.action == "skip":
            self.skipped += 1
            self._row += 1

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Read what was gathered, if it is time to; act on what was found."""
        if self._buffers is not None:
            # In the middle of an accumulation a checkpoint may be written, and a gradient scaler drops the step itself.
            if self._bad_window is not None:
                self._buffers.put_back_if(self._bad_window)
            elif self._poisoned and not self._undone:
                self._buffers.put_back()
        if not self._reads_freely:
            if trainer.global_step - self._read_step < self.every_n_steps:
                return
            self._read(trainer, module)
        if self._where:
            self._act(trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Nothing stays unread past an epoch."""
        self._read(trainer, module)
        if self._where:
            self._act(trainer)

    def _read(self, trainer: Any, module: Any) -> None:
        """Read what was gathered on the device: one wait for all of it."""
        self._read_step = trainer.global_step
        losses, self._losses = self._losses, []
        flags, self._flags = self._flags, []
        if losses:
            bad = torch.stack([~torch.isfinite(loss).all() for _, loss in losses]).tolist()
            for (step, _), is_bad in zip(losses, bad, strict=True):
                if is_bad:
                    weights = _bad_names(module, of_gradients=False)
                    self._found(step, "the loss is not finite" + (f", and by now {weights} neither" if weights else ""))
        if flags:
            for (step, _), is_bad in zip(flags, torch.stack([flag for _, flag in flags]).tolist(), strict=True):
                self._row = self._row + 1 if is_bad else 0
                if is_bad:
                    self._found(step, "gradients are not finite")
                    self.skipped += self.action == "skip"
        if trainer.world.any(bool(self._where)) and not self._where:
            self._found(trainer.global_step, "on another rank a loss or gradient is not finite")

    def _act(self, trainer: Any) -> None:
        where, self._where = self._where, ""
        if self.action == "raise":
            raise HastenError(f"NaNWatch: {where}", _FIX)
        if self.action == "skip":
            if self._row < self.patience:
                messages.warn(f"NaNWatch: {where}; dropped {self.skipped} steps so far", stacklevel=2)
                return
            where += f", and {self._row} steps in a row were dropped"
        trainer.should_stop = True
        say(trainer, f"NaNWatch: {where}. Training stops.\n  {_FIX}")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Take the flags off the optimizers, and let the copies go."""
        self._buffers = None
        for optimizer in trainer.optimizers:
            optimizer.__dict__.pop("found_inf", None)

    def state_dict(self) -> dict[str, Any]:
        """Return what was dropped so far, and what the step that is being gathered would be dropped by."""
        state: dict[str, Any] = {"skipped": self.skipped, "bad_steps": list(self.bad_steps), "row": self._row}
        if self._poisoned:
            state["poisoned"] = True
        if self._buffers is not None and self._window_open and self._gathers:
            state["buffers"] = self._buffers.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = state_dict["skipped"]
        self.bad_steps = list(state_dict["bad_steps"])
        self._row = state_dict.get("row", 0)
        self._poisoned = self._wary = state_dict.get("poisoned", False)
        self._kept_buffers = state_dict.get("buffers", [])


def _bad_names(module: torch.nn.Module, of_gradients: bool) -> str:
    """The first parameters whose gradients, or values, are not finite; "" if there are none."""
    bad = []
    for name, parameter in module.named_parameters():
        tensor = parameter.grad if of_gradients else parameter
        if tensor is not None and tensor.is_floating_point() and not torch.isfinite(local(tensor)).all():
            bad.append(name)
    return ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
