"""Optimizers and schedulers: parsing the result of `configure_optimizers`, stepping schedulers, clipping gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from hasten import messages
from hasten.errors import HastenError

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer

_SHAPES = (
    "configure_optimizers may give: an optimizer; a list of them; ([optimizers], [schedulers]); "
    '{"optimizer": ..., "lr_scheduler": ...}; a list of such dicts; or None'
)


@dataclass
class SchedulerConfig:
    """A learning-rate scheduler and when it steps, under the names and defaults in common use.

    Attributes:
        scheduler: The scheduler.
        name: The name that LearningRateMonitor logs it under.
        interval: When to step: after an "epoch", or after an optimizer "step".
        frequency: Step only if the number of finished epochs, or of the epoch's batches, is a multiple of this.
        reduce_on_plateau: Whether its step gets the monitored value.
        monitor: Name of the logged value that a ReduceLROnPlateau gets.
        strict: Whether it is an error if that value was not logged.
    """

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True


class NoOptimizer(torch.optim.Optimizer):
    """Stand-in for the optimizer when `configure_optimizers` returns None: it updates nothing."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})  # torch refuses an empty list of parameters
        self.param_groups = []

    def step(self, closure: Any = None) -> Any:
        """Run the closure, and update nothing."""
        return closure() if closure is not None else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: there are no gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: there is no state."""


def is_optimizer(value: Any) -> bool:
    """Return whether an object can be used as an optimizer, torch's or not."""
    return isinstance(value, torch.optim.Optimizer) or all(
        hasattr(value, name) for name in ("step", "state_dict", "load_state_dict", "param_groups")
    )


def parsed(
    returned: Any, automatic: bool, custom_scheduler_step: bool, error: Any = HastenError
) -> tuple[list[Any], list[SchedulerConfig]]:
    """Parse the result of `configure_optimizers` into optimizers and schedulers.

    Args:
        returned: The result of `configure_optimizers`.
        automatic: Whether the Trainer steps them.
        custom_scheduler_step: Whether the module defines `lr_scheduler_step`.
        error: The exception to raise.

    Raises:
        HastenError: The result has none of the accepted shapes.
    """
    if returned is None:
        messages.warn("configure_optimizers gave None: this fit will run with no optimizer", stacklevel=3)
        returned = NoOptimizer()
    optimizers, schedulers, monitor = _unpacked(returned, error)
    if automatic and len(optimizers) > 1:
        raise RuntimeError(
            "training with multiple optimizers is only supported with manual optimization: set"
            " self.automatic_optimization = False and step them in training_step (opt1, opt2 = self.optimizers())"
        )
    configs = [_config(scheduler, monitor, automatic, error) for scheduler in schedulers]
    for config in configs:
        _check(config, optimizers, automatic, custom_scheduler_step, error)
    return optimizers, configs


def _unpacked(returned: Any, error: Any) -> tuple[list[Any], list[Any], str | None]:
    """Return the optimizers, the schedulers as given, and the "monitor" that stands beside them."""
    if is_optimizer(returned):
        return [returned], [], None
    if isinstance(returned, Mapping):
        _known_keys(returned, error)
        schedulers = [returned["lr_scheduler"]] if returned.get("lr_scheduler") is not None else []
        return [returned["optimizer"]], schedulers, returned.get("monitor")
    if isinstance(returned, list | tuple):
        if len(returned) == 2 and isinstance(returned[0], list) and all(map(is_optimizer, returned[0])):
            return returned[0], returned[1] if isinstance(returned[1], list) else [returned[1]], None
        if returned and all(isinstance(config, Mapping) for config in returned):
            for config in returned:
                _known_keys(config, error)
            schedulers = [config["lr_scheduler"] for config in returned if "lr_scheduler" in config]
            return [config["optimizer"] for config in returned], schedulers, None
        if all(map(is_optimizer, returned)):
            return list(returned), [], None
    type_names = ", ".join(type(entry).__name__ for entry in returned) if isinstance(returned, list | tuple) else ""
    raise error(
        f"Unknown configuration for model optimizers: configure_optimizers gave a {type(returned).__name__}"
        f"{type_names and f' of {type_names}'}",
        _SHAPES,
    )


def _known_keys(config: Mapping[str, Any], error: Any) -> None:
    """Raise if a dict has no optimizer; warn of keys that are ignored."""
    if not is_optimizer(config.get("optimizer")):
        raise error(
            f'Unknown configuration for model optimizers: "optimizer" is {config.get("optimizer")!r} in the dict that'
            " configure_optimizers gave",
            _SHAPES,
        )
    if unknown := config.keys() - {"optimizer", "lr_scheduler", "monitor"}:
        messages.warn(
            f"Found unsupported keys in the optimizer configuration: {set(unknown)}; they are ignored",
            RuntimeWarning,
            stacklevel=6,
        )


def _config(entry: Any, monitor: str | None, automatic: bool, error: Any) -> SchedulerConfig:
    """Return the config of a scheduler, or of a dict with a scheduler."""
    plateau = isinstance(entry, ReduceLROnPlateau)
    if not isinstance(entry, Mapping):
        if plateau and automatic and monitor is None:
            raise error(
                "`configure_optimizers` must include a monitor when a `ReduceLROnPlateau` is used",
                'configure_optimizers: {"optimizer": ..., "lr_scheduler": ..., "monitor": "val_loss"}',
            )
        return SchedulerConfig(entry, reduce_on_plateau=plateau and automatic, monitor=monitor if plateau else None)
    known = {field.name for field in fields(SchedulerConfig)}
    if unknown := entry.keys() - known:
        messages.warn(
            f"Found unsupported keys in the lr scheduler dict: {set(unknown)}; they are ignored",
            RuntimeWarning,
            stacklevel=5,
        )
    if "scheduler" not in entry:
        raise error('The lr scheduler dict must have the key "scheduler"', '{"scheduler": ..., "interval": "step"}')
    config = SchedulerConfig(**{key: value for key, value in entry.items() if key in known})
    if not automatic:
        if idle := entry.keys() & {"reduce_on_plateau", "monitor", "strict"}:
            messages.warn(
                f"The lr scheduler dict has {sorted(idle)}, but the keys will be ignored: in manual optimization you"
                " step schedulers yourself",
                RuntimeWarning,
                stacklevel=5,
            )
        return SchedulerConfig(config.scheduler, config.name, config.interval, config.frequency)
    if config.interval not in ("step", "epoch"):
        raise error(f'The "interval" key in lr scheduler dict must be "step" or "epoch", not {config.interval!r}')
    frequency: Any = config.frequency
    if not isinstance(frequency, int) or frequency < 1:
        raise error(f'The "frequency" in lr scheduler dict must be an int of at least 1, not {frequency!r}')
    config.reduce_on_plateau = entry.get("reduce_on_plateau", isinstance(config.scheduler, ReduceLROnPlateau))
    if config.reduce_on_plateau and config.monitor is None:
        raise error(
            "The lr scheduler dict must include a monitor when a `ReduceLROnPlateau` is used",
            '{"scheduler": scheduler, "monitor": "val_loss"}',
        )
    if isinstance(config.scheduler, OneCycleLR) and config.interval == "epoch":
        messages.warn('OneCycleLR steps by batch, but "interval" is "epoch" here', RuntimeWarning, stacklevel=5)
    return config


def _check(config: SchedulerConfig, optimizers: list[Any], automatic: bool, custom: bool, error: Any) -> None:
    """Raise if a scheduler cannot be stepped or saved, or belongs to an optimizer that was not returned."""
    scheduler = config.scheduler
    kind = type(scheduler).__name__
    if not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        raise TypeError(f"The provided lr scheduler `{kind}` is invalid: it must have state_dict and load_state_dict")
    if not isinstance(scheduler, LRScheduler | ReduceLROnPlateau) and automatic and not custom:
        raise error(
            f"The lr scheduler `{kind}` doesn't follow PyTorch's LRScheduler",
            "override lr_scheduler_step, and step it there",
        )
    attached = getattr(scheduler, "optimizer", None)
    if attached is not None and not any(attached is optimizer for optimizer in optimizers):
        raise error(
            f"the lr scheduler {kind} is attached with an optimizer that wasn't returned from configure_optimizers",
            "return both",
        )


def step_schedulers(trainer: Trainer, interval: str, plateau: bool) -> None:
    """Step the learning-rate schedulers that are due.

    Args:
        trainer: The Trainer.
        interval: Step schedulers with this interval, "step" or "epoch".
        plateau: Step schedulers that monitor a metric (True), or the others (False).
    """
    engine, progress = trainer.engine, trainer.progress
    schedulers = engine.optimizing.schedulers
    if not schedulers or not trainer.model.automatic_optimization:  # in manual optimization the module steps them
        return
    hook = engine.hooks.of_module("lr_scheduler_step")
    count = progress.batch_idx if interval == "step" else progress.current_epoch + 1
    for config in schedulers:
        if config.interval != interval or config.reduce_on_plateau != plateau or count % config.frequency:
            continue
        value = _monitored(trainer, config) if config.reduce_on_plateau else None
        if config.reduce_on_plateau and value is None:  # not logged, and strict=False: `_monitored` has warned
            continue
        if hook is not None:
            hook(config.scheduler, value)
        elif value is None:
            config.scheduler.step()
        else:
            config.scheduler.step(value)


def _monitored(trainer: Trainer, config: SchedulerConfig) -> Any:
    """Return the metric that a scheduler monitors; None if it was not logged and the config is not strict.

    Raises:
        HastenError: The metric was not logged, and the config is strict.
    """
    value = trainer.callback_metrics.get(str(config.monitor))
    if value is not None:
        return value
    missing = f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available"
    if config.strict:
        raise trainer.misconfigured(
            f"{missing}. Available metrics are: {sorted(trainer.callback_metrics)}",
            'log it, or say "strict": False in the lr scheduler dict',
        )
    messages.warn(f"{missing} but strict is False: it does not step", RuntimeWarning, stacklevel=3)
    return None


def clip(optimizer: Any, value: float | None, algorithm: str = "norm") -> None:
    """Clip an optimizer's gradients.

    Args:
        optimizer: The optimizer whose parameters to clip.
        value: The largest norm, or the largest absolute value; None and 0 clip nothing.
        algorithm: "norm" (over all parameters together) or "value".
    """
    if not value:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if str(algorithm).endswith("value"):
        torch.nn.utils.clip_grad_value_(parameters, value)
    else:
        torch.nn.utils.clip_grad_norm_(parameters, value)
