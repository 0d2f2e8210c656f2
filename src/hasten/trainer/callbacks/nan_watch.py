"""NaNWatch: notice a loss that is NaN or infinite, stop or skip, and keep bad weights out of checkpoints.

Reading a loss is free on a CPU, but stalls a GPU. So there are two ways: on one CPU process every loss is read at once,
and a bad step is dropped before it reaches the weights. Elsewhere losses and flags of bad gradients are collected on
the device and read together every `every_n_steps`; with "skip", steps are dropped on the device by those flags.
"""

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
    """Watch the loss, and optionally the gradients, for NaN and infinity.

    In one process on a CPU, every loss is read at once, since that is free there, and a step with a bad loss is dropped
    before it reaches the weights, whatever the action. Elsewhere losses stay on the device and are read together every
    `every_n_steps`. Until that read, the weights may already be lost, but no checkpoint of them is written.

    "skip" drops each optimizer step whose gradients are not finite (the optimizer's state is not changed either). An
    optimizer built with `fused=True` skips such a step itself, by a flag on the device; any other optimizer costs one
    read per step. Under `precision="16-mixed"` the gradient scaler skips already, and this callback only watches the
    loss.

    When a step is dropped, all buffers (BatchNorm's statistics) are restored to their values before the step's first
    batch, or before this batch in manual optimization. For that, they are copied at each step.

    Args:
        action: "stop": training ends as after its last step; "raise": raise a HastenError; "skip": see above.
        every_n_steps: Optimizer steps between two reads of the device.
        watch_gradients: Also check gradients, before each optimizer step; "skip" does so anyway.
        patience: With "skip": stop after this many dropped steps in a row.

    Attributes:
        bad_steps: Optimizer steps (from 0) with a bad loss or gradient; the first 100.
        skipped: Optimizer steps dropped; on a GPU as of the last read.

    Raises:
        HastenError: The action is unknown, or a number is below 1; at run time with "raise".
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
        self._problem = ""  # a description of the first bad step; "" if there was none
        self._poisoned = False  # a bad loss went into the gradients being accumulated
        self._wary = False  # a bad loss was seen, which may concern any of several optimizers
        self._buffers: BufferCopies | None = None
        self._resumed_buffers: list[torch.Tensor] = []  # their copies from a checkpoint, until training starts
        self._accumulates = False  # a step takes several batches
        self._buffers_restored = False  # in this batch; a later optimizer may have stepped since
        self._window_open = False  # the copies are of before the current step, so they may be restored
        self._bad_window: torch.Tensor | None = None  # on the device: 1 where a loss of this step is bad
        self._skipped_in_a_row = 0  # number of dropped steps in a row
        self._losses: list[tuple[int, torch.Tensor]] = []  # step and loss, not read yet
        self._flags: list[tuple[int, torch.Tensor]] = []  # step and flag, not read yet; 1: gradients were bad
        self._read_step = 0
        self._reads_freely = False
        self._scaler: Any = None  # the precision technique, if it scales gradients (fp16)

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Decide how to watch, and reset the state of an earlier run. A checkpoint loaded later may restore it."""
        self._reads_freely = trainer.device.type == "cpu" and trainer.world_size == 1
        scales = trainer.precision == "16-mixed"
        self._scaler = next(
            (technique for technique in trainer.run.techniques if technique.name == "precision" and scales), None
        )
        self._problem, self._poisoned, self._wary, self._skipped_in_a_row = "", False, False, 0
        self._losses, self._flags = [], []
        self._buffers, self._resumed_buffers, self._window_open, self._bad_window = None, [], False, None

    def needs(self, hook: str) -> bool:
        """Return whether gradients are checked, and whether buffers need copies."""
        wanted = self._reads_freely or self.watch_gradients or self.action == "skip"
        if hook == "on_train_batch_start":
            return self._drops
        return hook != "on_before_optimizer_step" or wanted

    @property
    def _scaled(self) -> bool:
        """Whether the gradient scaler drops overflowed steps. That can end during training (a hook on a gradient)."""
        return self._scaler is not None and self._scaler.drops_overflows

    @property
    def _drops(self) -> bool:
        """Whether bad steps are dropped, so that training continues or weights are saved without them."""
        return self._reads_freely or self.action == "skip"

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Count the steps between reads from here, and find the buffers."""
        self._read_step = trainer.global_step
        self._buffers = BufferCopies(module) if self._drops else None
        if self._buffers is not None and self._resumed_buffers:
            self._buffers.load_state_dict(self._resumed_buffers)
            self._window_open = True

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """Find buffers that were registered since the last epoch."""
        if self._buffers is not None:
            self._buffers.look()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
        """Copy the buffers at the beginning of a step, not within an accumulation."""
        if self._buffers is not None and (not self._window_open or not batch_idx % trainer.accumulate_grad_batches):
            self._buffers.take()
            self._accumulates = trainer.accumulate_grad_batches > 1
            self._window_open, self._bad_window, self._poisoned, self._buffers_restored = True, None, False, False
        return None

    def on_before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        """Read the loss, or collect it for a later read."""
        loss = loss.detach()
        if not self._reads_freely:
            loss = loss.clone()  # the next replay of a CUDA graph would overwrite it
            self._losses.append((trainer.global_step, loss))
            if self._buffers is not None and (self._scaled or self._accumulates):
                flag = ~torch.isfinite(loss).all()
                self._bad_window = flag if self._bad_window is None else self._bad_window | flag
        elif not math.isfinite(value := loss.item() if loss.numel() == 1 else float(loss.sum())):
            self._poisoned = self._wary = True
            self._note_bad_step(trainer.global_step, f"the loss is {value}")

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Drop the step if its loss or gradients are bad."""
        if self._scaled:
            return
        several = not module.automatic_optimization  # there may be several optimizers: whose loss was bad is unknown
        poisoned, self._poisoned = self._poisoned and not several, self._poisoned and several
        if poisoned:
            self._drop(optimizer)
        elif self.action == "skip" or self.watch_gradients or (several and self._wary):
            self._check_gradients(trainer, module, optimizer)
        self._window_open = False

    def _check_gradients(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Check the gradients of an optimizer; on a bad one, drop its step or collect the flag for a later read."""
        groups = alike(p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        step = trainer.global_step
        if self._reads_freely:
            if not all(finite(group) for group in groups):
                self._note_bad_step(step, f"the gradient of {_bad_names(module, of_gradients=True)} is not finite")
                self._drop(optimizer)
            else:
                self._skipped_in_a_row = 0
            return
        device = trainer.device
        flags = [non_finite_flag(group).to(device) for group in groups] or [torch.zeros((), device=device)]
        flag = torch.stack(flags).max()
        if trainer.world_size > 1:  # all ranks must drop the step, or none
            flag = trainer.world.reduce(flag, "max")
        if self.action != "skip":
            self._flags.append((step, flag))
        elif getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = flag  # where this is 1, the fused kernel changes neither weights nor state
            self._flags.append((step, flag))
            if self._buffers is not None:
                self._buffers.put_back_if(flag)
        elif bool(flag):
            self._note_bad_step(step, f"the gradient of {_bad_names(module, of_gradients=True)} is not finite")
            self._drop(optimizer)
        else:
            self._skipped_in_a_row = 0

    def _note_bad_step(self, step: int, problem: str) -> None:
        """Note a bad step, and describe the first one."""
        self._problem = self._problem or f"step {step}: {problem}"
        if len(self.bad_steps) < 100 and step not in self.bad_steps[-1:]:
            self.bad_steps.append(step)

    def _drop(self, optimizer: Any) -> None:
        """Drop a step by removing gradients: optimizers skip parameters that have none."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        if self._buffers is not None:
            self._buffers.put_back()
            self._buffers_restored = True
        if self.action == "skip":
            self.skipped += 1
            self._skipped_in_a_row += 1

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Read the collected losses and flags if it is time to; act if a step was bad."""
        if self._buffers is not None:
            # Restore now, not only when the step is dropped: a checkpoint may be written within an accumulation, and
            # a gradient scaler drops the step without telling this callback.
            if self._bad_window is not None:
                self._buffers.put_back_if(self._bad_window)
            elif self._poisoned and not self._buffers_restored:
                self._buffers.put_back()
        if not self._reads_freely:
            if trainer.global_step - self._read_step < self.every_n_steps:
                return
            self._read(trainer, module)
        if self._problem:
            self._act(trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Read everything collected, so that nothing stays unread past an epoch."""
        self._read(trainer, module)
        if self._problem:
            self._act(trainer)

    def _read(self, trainer: Any, module: Any) -> None:
        """Read all losses in one transfer from the device, and all flags in another."""
        self._read_step = trainer.global_step
        losses, self._losses = self._losses, []
        flags, self._flags = self._flags, []
        if losses:
            bad = torch.stack([~torch.isfinite(loss).all() for _, loss in losses]).tolist()
            for (step, _), is_bad in zip(losses, bad, strict=True):
                if is_bad:
                    weights = _bad_names(module, of_gradients=False)
                    self._note_bad_step(
                        step, "the loss is not finite" + (f", and by now {weights} neither" if weights else "")
                    )
        if flags:
            for (step, _), is_bad in zip(flags, torch.stack([flag for _, flag in flags]).tolist(), strict=True):
                self._skipped_in_a_row = self._skipped_in_a_row + 1 if is_bad else 0
                if is_bad:
                    self._note_bad_step(step, "gradients are not finite")
                    self.skipped += self.action == "skip"
        if trainer.world.any(bool(self._problem)) and not self._problem:
            self._note_bad_step(trainer.global_step, "on another rank a loss or gradient is not finite")

    def _act(self, trainer: Any) -> None:
        """Raise, warn or stop training, depending on the action."""
        problem, self._problem = self._problem, ""
        if self.action == "raise":
            raise HastenError(f"NaNWatch: {problem}", _FIX)
        if self.action == "skip":
            if self._skipped_in_a_row < self.patience:
                messages.warn(f"NaNWatch: {problem}; dropped {self.skipped} steps so far", stacklevel=2)
                return
            problem += f", and {self._skipped_in_a_row} steps in a row were dropped"
        trainer.should_stop = True
        say(trainer, f"NaNWatch: {problem}. Training stops.\n  {_FIX}")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Remove the flags from the optimizers and free the buffers' copies."""
        self._buffers = None
        for optimizer in trainer.optimizers:
            optimizer.__dict__.pop("found_inf", None)

    def state_dict(self) -> dict[str, Any]:
        """Return the dropped steps so far and, within an accumulation, what is needed to drop the current step."""
        state: dict[str, Any] = {
            "skipped": self.skipped,
            "bad_steps": list(self.bad_steps),
            "row": self._skipped_in_a_row,
        }
        if self._poisoned:
            state["poisoned"] = True
        if self._buffers is not None and self._window_open and self._accumulates:
            state["buffers"] = self._buffers.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = state_dict["skipped"]
        self.bad_steps = list(state_dict["bad_steps"])
        self._skipped_in_a_row = state_dict.get("row", 0)
        self._poisoned = self._wary = state_dict.get("poisoned", False)
        self._resumed_buffers = state_dict.get("buffers", [])


def _bad_names(module: torch.nn.Module, of_gradients: bool) -> str:
    """Return the first parameters whose gradients, or values, are not finite; "" if there are none."""
    bad = []
    for name, parameter in module.named_parameters():
        tensor = parameter.grad if of_gradients else parameter
        if tensor is not None and tensor.is_floating_point() and not torch.isfinite(local(tensor)).all():
            bad.append(name)
    return ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
