"""EMA: keep an exponential moving average of the weights, which often performs better than the weights themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hasten.errors import HastenError
from hasten.parallel.sharded import local, share_of
from hasten.trainer.callbacks.base import Callback

_RAW = "current_model_state"  # the key that other trainers' averaging callbacks use, too


class EMA(Callback):
    """Keep an exponential moving average of the trained parameters; validate, test and save with it.

    After an optimizer step, `average += (1 - decay) * (weights - average)`, for all parameters of one device and dtype
    in one `torch._foreach_lerp_`; half-precision parameters are averaged in float32. Frozen parameters are left out.
    Buffers (BatchNorm's statistics) are not averaged: the model's current ones are used.

    A checkpoint's `state_dict` holds the averaged weights, so that whoever loads it gets the weights that were
    validated. The weights that training continues with are stored beside it, so that a resumed run is exact.

    Args:
        decay: Share of the average that is kept at each update, 0 to 1.
        every_n_steps: Optimizer steps between two updates.
        start_step: Optimizer steps before averaging begins.
        warmup: Begin with a smaller decay, `(1 + n) / (10 + n)` at update n, so that early weights are soon forgotten.
        validate_with_average: Validate and test with the averaged weights.
        apply_at_end: Leave the averaged weights in the model when training has ended.

    Attributes:
        updates: Updates so far.

    Raises:
        HastenError: An argument is out of its range.
    """

    changes_saved_weights = True

    def __init__(
        self,
        decay: float = 0.999,
        every_n_steps: int = 1,
        start_step: int = 0,
        warmup: bool = False,
        validate_with_average: bool = True,
        apply_at_end: bool = False,
    ) -> None:
        if not 0 <= decay < 1:
            raise HastenError(f"EMA(decay={decay}): must be 0 or more and less than 1", "0.999 is usual")
        if every_n_steps < 1 or start_step < 0:
            raise HastenError(
                f"EMA(every_n_steps={every_n_steps}, start_step={start_step})",
                "every_n_steps is 1 or more, start_step 0 or more",
            )
        self.decay = decay
        self.every_n_steps = every_n_steps
        self.start_step = start_step
        self.warmup = warmup
        self.validate_with_average = validate_with_average
        self.apply_at_end = apply_at_end
        self.updates = 0
        self._step = 0  # optimizer steps seen
        self._average: dict[str, torch.Tensor] = {}
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor], bool]] = []
        self._raw_weights: list[torch.Tensor] = []  # the raw weights, while the model holds the average
        self._loaded: dict[str, torch.Tensor] | None = None  # the average from a checkpoint, until training starts
        self._fitting = False

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Note whether this run trains."""
        self._fitting = stage == "fit"

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Start the average from the current weights, or continue with a checkpoint's average."""
        self._raw_weights = []
        self._groups = []
        if self._loaded is not None:
            self._begin(module)
            for name, average in self._average.items():
                local(average).copy_(local(share_of(self._loaded[name], average)))
            self._loaded = None
        elif trainer.global_step == 0:
            self._average, self.updates = {}, 0
            if self.start_step == 0:
                self._begin(module)
        self._step = trainer.global_step

    def _begin(self, module: Any) -> None:
        """Start the average as a copy of the trained parameters."""
        self._average = {
            name: p.detach().to(_wide(p.dtype), copy=True)
            for name, p in module.named_parameters()
            if p.requires_grad and p.is_floating_point()
        }
        self._groups = []

    def _group(self, module: Any) -> None:
        """Group averages and parameters by device and dtype, as `torch._foreach` functions need them; not per step.

        Called at the first update, not earlier: under torch 2.9 (no longer under 2.13) FSDP's first forward moves a
        rank's shard to other memory if the shards differ in size. Tensors grouped before that would never see an
        update.
        """
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor], bool]] = {}
        parameters = dict(module.named_parameters())
        for name, average in self._average.items():
            parameter = parameters[name]
            key = average.device, parameter.dtype
            averages, weights, _ = groups.setdefault(key, ([], [], parameter.dtype == average.dtype))
            averages.append(local(average))  # each process averages its own shard of a sharded model
            weights.append(local(parameter))
        self._groups = list(groups.values())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Update the average if the optimizer stepped."""
        step = trainer.global_step
        # The hook comes once per batch; while gradients accumulate, no step was made.
        if step == self._step:
            return
        self._step = step
        if step % self.every_n_steps or step < self.start_step:
            return
        if not self._average:
            self._begin(module)
            return
        if not self._groups:
            self._group(module)
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        with torch.no_grad():
            for averages, weights, is_wide in self._groups:
                current = weights if is_wide else [weight.to(averages[0].dtype) for weight in weights]
                torch._foreach_lerp_(averages, current, 1 - decay)
        self.updates += 1

    def _weights(self, module: Any) -> list[torch.Tensor]:
        """Return the averaged parameters of the module, in the order of the average."""
        return [p.detach() for name, p in module.named_parameters() if name in self._average]

    # -- using the average -----------------------------------------------------------------------------

    def apply_to(self, module: torch.nn.Module) -> None:
        """Copy the averaged weights into a module with the same parameters.

        Raises:
            HastenError: There is no average yet, or the module lacks one of its parameters.
        """
        if not self._average:
            raise HastenError("EMA.apply_to: there is no average yet", f"it begins at step {self.start_step} of fit")
        parameters = dict(module.named_parameters())
        missing = next((name for name in self._average if name not in parameters), None)
        if missing is not None:
            raise HastenError(f"EMA.apply_to: the module has no parameter {missing}", "give a model of the same layers")
        with torch.no_grad():
            for name, average in self._average.items():
                parameters[name].copy_(average)

    @contextmanager
    def averaged(self, module: torch.nn.Module) -> Iterator[None]:
        """Give the module the averaged weights within the block."""
        self._swap_in(module)
        try:
            yield
        finally:
            self._swap_out(module)

    def _swap_in(self, module: Any) -> None:
        """Save the module's weights and replace them by the average, unless that is done already."""
        if self._average and not self._raw_weights:
            weights = self._weights(module)
            self._raw_weights = [weight.clone() for weight in weights]
            torch._foreach_copy_([*map(local, weights)], [*map(local, self._average.values())])

    def _swap_out(self, module: Any) -> None:
        """Restore the saved weights, if the module holds the average."""
        if self._raw_weights:
            torch._foreach_copy_([*map(local, self._weights(module))], [*map(local, self._raw_weights)])
            self._raw_weights = []

    def _evaluates(self, trainer: Any) -> bool:
        """Return whether to evaluate with the average.

        Not in a `validate` or `test` of a checkpoint: the weights loaded from it are averaged already.
        """
        return self.validate_with_average and (self._fitting or trainer.ckpt_path is None)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Swap in the average for validation."""
        if self._evaluates(trainer):
            self._swap_in(module)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Restore the weights for training."""
        self._swap_out(module)

    def on_test_start(self, trainer: Any, module: Any) -> None:
        if self._evaluates(trainer):
            self._swap_in(module)

    def on_test_end(self, trainer: Any, module: Any) -> None:
        self._swap_out(module)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Restore the weights, in case the exception ended a validation."""
        self._swap_out(module)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Leave the average in the model if `apply_at_end` is set."""
        if self.apply_at_end and self._average:
            self.apply_to(module)

    # -- checkpoints -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the counters; the average itself is in the checkpoint (see `on_save_checkpoint`)."""
        return {"updates": self.updates, "step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.updates = state_dict["updates"]
        self._step = state_dict["step"]

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Store the averaged weights as the `state_dict`, and the weights that training continues with beside it."""
        if not self._average:
            return
        weights = dict(zip(self._average, self._raw_weights or self._weights(module), strict=True))
        names = {id(p): name for name, p in module.named_parameters()}
        aliases = {  # state_dict key -> parameter name; tied weights have several keys
            key: names[id(p)] for key, p in module.state_dict(keep_vars=True).items() if names.get(id(p)) in weights
        }
        saved = checkpoint["state_dict"]
        aliases = {key: name for key, name in aliases.items() if key in saved}
        checkpoint[_RAW] = {**saved, **{key: weights[name] for key, name in aliases.items()}}
        checkpoint["state_dict"] = {
            **saved,
            **{key: self._average[name].to(weights[name].dtype) for key, name in aliases.items()},
        }
        checkpoint["ema"] = {name: a for name, a in self._average.items() if a.dtype != weights[name].dtype}

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """On resuming, load the raw weights into the model and keep the average for `on_train_start`."""
        if _RAW not in checkpoint or not self._fitting:
            return
        averaged = {**checkpoint["state_dict"], **checkpoint.get("ema", {})}
        trained = [name for name, p in module.named_parameters() if p.requires_grad and p.is_floating_point()]
        self._loaded = {name: averaged[name] for name in trained}
        checkpoint["state_dict"] = checkpoint[_RAW]
        trainer.engine.strategy.load_model(
            module, checkpoint[_RAW], True
        )  # again: the averaged weights may have been loaded before this hook


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to average parameters of this dtype: at least float32.

    Half precision cannot represent `1 - decay` steps: they would be rounded away.
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
