"""EMA: the exponential moving average of the weights, often better than the weights themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hasten.errors import HastenError
from hasten.parallel.sharded import local, share_of
from hasten.trainer.callbacks.base import Callback

_RAW = "current_model_state"  # the key that other trainers' averages use, too


class EMA(Callback):
    """Keep an exponential moving average of the trained parameters; validate, test and save with it.

    After an optimizer step, `average += (1 - decay) * (weights - average)`, for all parameters in one
    `torch._foreach_lerp_`; half-precision parameters are averaged in float32. Buffers (BatchNorm's statistics) are
    the model's own current ones. Frozen parameters are left out.

    A checkpoint's `state_dict` holds the averaged weights, so that who loads it gets what validation measured; the
    weights that training goes on with are beside it, so that a resumed run is exact.

    Args:
        decay: How much of the average stays at each update, 0 to 1.
        every_n_steps: Update after every so many optimizer steps.
        start_step: Optimizer steps before averaging begins.
        warmup: Begin with a smaller decay, `(1 + n) / (10 + n)` at update n, so that early weights are soon forgotten.
        validate_with_average: Validate and test with the averaged weights.
        apply_at_end: Leave the averaged weights in the model when training has ended.

    Attributes:
        updates: Updates so far.

    Raises:
        HastenError: An argument out of its range.
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
        self._kept: list[torch.Tensor] = []  # the weights themselves, while the model holds the average
        self._loaded: dict[str, torch.Tensor] | None = None  # what a checkpoint brought, until training starts
        self._fitting = False

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Note whether this is training."""
        self._fitting = stage == "fit"

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Begin with the weights as they are, or go on with a checkpoint's average."""
        self._kept = []
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
        self._average = {
            name: p.detach().to(_wide(p.dtype), copy=True)
            for name, p in module.named_parameters()
            if p.requires_grad and p.is_floating_point()
        }
        self._groups = []

    def _group(self, module: Any) -> None:
        """Averages and parameters by device and dtype, as `torch._foreach` functions want them; once, not each step.

        Not before the first update: under torch 2.9 (no longer under 2.13) FSDP's first forward moves a rank's part to
        other memory where the parts have several sizes, and what was taken before then is never updated.
        """
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor], bool]] = {}
        parameters = dict(module.named_parameters())
        for name, average in self._average.items():
            parameter = parameters[name]
            key = average.device, parameter.dtype
            averages, weights, _ = groups.setdefault(key, ([], [], parameter.dtype == average.dtype))
            averages.append(local(average))  # of a sharded model each process averages its part
            weights.append(local(parameter))
        self._groups = list(groups.values())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Update if the optimizer stepped."""
        step = trainer.global_step
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
                now = weights if is_wide else [weight.to(averages[0].dtype) for weight in weights]
                torch._foreach_lerp_(averages, now, 1 - decay)
        self.updates += 1

    def _weights(self, module: Any) -> list[torch.Tensor]:
        return [p.detach() for name, p in module.named_parameters() if name in self._average]

    # -- using the average -----------------------------------------------------------------------------

    def apply_to(self, module: torch.nn.Module) -> None:
        """Copy the averaged weights into a module with the same parameters.

        Raises:
            HastenError: There is no average yet, or a parameter is missing.
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
        """Within the block, the module has the averaged weights."""
        self._swap_in(module)
        try:
            yield
        finally:
            self._swap_out(module)

    def _swap_in(self, module: Any) -> None:
        if self._average and not self._kept:
            weights = self._weights(module)
            self._kept = [weight.clone() for weight in weights]
            torch._foreach_copy_([*map(local, weights)], [*map(local, self._average.values())])

    def _swap_out(self, module: Any) -> None:
        if self._kept:
            torch._foreach_copy_([*map(local, self._weights(module))], [*map(local, self._kept)])
            self._kept = []

    def _evaluates(self, trainer: Any) -> bool:
        """What was loaded from a checkpoint to be tested is averaged already."""
        return self.validate_with_average and (self._fitting or trainer.ckpt_path is None)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Validate the average."""
        if self._evaluates(trainer):
            self._swap_in(module)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Training goes on with the weights."""
        self._swap_out(module)

    def on_test_start(self, trainer: Any, module: Any) -> None:
        if self._evaluates(trainer):
            self._swap_in(module)

    def on_test_end(self, trainer: Any, module: Any) -> None:
        self._swap_out(module)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Validation may have been cut short."""
        self._swap_out(module)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Leave the average in the model, if asked to."""
        if self.apply_at_end and self._average:
            self.apply_to(module)

    # -- checkpoints -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return how far the averaging is; the average itself is in the checkpoint (see `on_save_checkpoint`)."""
        return {"updates": self.updates, "step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.updates = state_dict["updates"]
        self._step = state_dict["step"]

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Averaged weights where everybody looks for weights; those that training goes on with beside them."""
        if not self._average:
            return
        weights = dict(zip(self._average, self._kept or self._weights(module), strict=True))
        names = {id(p): name for name, p in module.named_parameters()}
        aliases = {  # also the other names of tied weights
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
        """Resuming: the weights go into the model, the average comes here."""
        if _RAW not in checkpoint or not self._fitting:
            return
        averaged = {**checkpoint["state_dict"], **checkpoint.get("ema", {})}
        trained = [name for name, p in module.named_parameters() if p.requires_grad and p.is_floating_point()]
        self._loaded = {name: averaged[name] for name in trained}
        checkpoint["state_dict"] = checkpoint[_RAW]
        trainer.engine.strategy.load_model(
            module, checkpoint[_RAW], True
        )  # also where the averaged ones were loaded already


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return a tensor in a format in which small changes are not lost: half precision does not resolve 1 - decay."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
