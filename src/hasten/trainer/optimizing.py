"""Optimizers and schedulers: what `configure_optimizers` may give, when schedulers step, and clipping."""

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
    """A learning-rate scheduler and when it steps; names and defaults are those that people know.

    Attributes:
        interval: "epoch", or "step" (optimizer steps).
        frequency: Every how many of them.
        monitor: The logged value that a ReduceLROnPlateau is given.
        strict: Whether a value that is missing is an error.
        name: For LearningRateMonitor.
    """

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True


class NoOptimizer(torch.optim.Optimizer):
    """Stands where `configure_optimizers` gave None: nothing learns."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})
        self.param_groups = []

    def step(self, closure: Any = None) -> Any:
        """Only run the closure."""
        return closure() if closure is not None else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """There is nothing to clear."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """There is nothing to load."""


def is_optimizer(thing: Any) -> bool:
    """Whether it can be used as an optimizer, torch's or not."""
    return isinstance(thing, torch.optim.Optimizer) or all(
        hasattr(thing, name) for name in ("step", "state_dict", "load_state_dict", "param_groups")
    )


def parsed(
    given: Any, automatic: bool, custom_scheduler_step: bool, error: Any = HastenError
) -> tuple[list[Any], list[SchedulerConfig]]:
    """Return what `configure_optimizers` gave, as optimizers and schedulers.

    Args:
        given: Its answer.
        automatic: Whether the Trainer steps them.
        custom_scheduler_step: Whether the module has a `lr_scheduler_step` of its own.
        error: The exception for what is wrong.

    Raises:
        HastenError: The answer has none of the known shapes.
    """
    if given is None:
        messages.warn("configure_optimizers gave None: this fit will run with no optimizer", stacklevel=3)
        given = NoOptimizer()
    optimizers, schedulers, monitor = _unpacked(given, error)
    if automatic and len(optimizers) > 1:
        raise RuntimeError(
            "training with multiple optimizers is only supported with manual optimization: set"
            " self.automatic_optimization = False and step them in training_step (opt1, opt2 = self.optimizers())"
        )
    configs = [_config(scheduler, monitor, automatic, error) for scheduler in schedulers]
    for config in configs:
        _check(config, optimizers, automatic, custom_scheduler_step, error)
    return optimizers, configs


def _unpacked(given: Any, error: Any) -> tuple[list[Any], list[Any], str | None]:
    if is_optimizer(given):
        return [given], [], None
    if isinstance(given, Mapping):
        _known_keys(given, error)
        schedulers = [given["lr_scheduler"]] if given.get("lr_scheduler") is not None else []
        return [given["optimizer"]], schedulers, given.get("monitor")
    if isinstance(given, list | tuple):
        if len(given) == 2 and isinstance(given[0], list) and all(map(is_optimizer, given[0])):
            return given[0], given[1] if isinstance(given[1], list) else [given[1]], None
        if given and all(isinstance(one, Mapping) for one in given):
            for one in given:
                _known_keys(one, error)
            found = [one["lr_scheduler"] for one in given if "lr_scheduler" in one]
            return [one["optimizer"] for one in given], found, None
        if all(map(is_optimizer, given)):
            return list(given), [], None
    kinds = ", ".join(type(one).__name__ for one in given) if isinstance(given, list | tuple) else ""
    raise error(
        f"Unknown configuration for model optimizers: configure_optimizers gave a {type(given).__name__}"
        f"{kinds and f' of {kinds}'}",
        _SHAPES,
    )


def _known_keys(given: Mapping[str, Any], error: Any) -> None:
    if not is_optimizer(given.get("optimizer")):
        raise error(
            f'Unknown configuration for model optimizers: "optimizer" is {given.get("optimizer")!r} in the dict that'
            " configure_optimizers gave",
            _SHAPES,
        )
    if unknown := given.keys() - {"optimizer", "lr_scheduler", "monitor"}:
        messages.warn(
            f"Found unsupported keys in the optimizer configuration: {set(unknown)}; they are ignored",
            RuntimeWarning,
            stacklevel=6,
        )


def _config(given: Any, monitor: str | None, automatic: bool, error: Any) -> SchedulerConfig:
    plateau = isinstance(given, ReduceLROnPlateau)
    if not isinstance(given, Mapping):
        if plateau and automatic and monitor is None:
            raise error(
                "`configure_optimizers` must include a monitor when a `ReduceLROnPlateau` is used",
                'configure_optimizers: {"optimizer": ..., "lr_scheduler": ..., "monitor": "val_loss"}',
            )
        return SchedulerConfig(given, reduce_on_plateau=plateau and automatic, monitor=monitor if plateau else None)
    known = {field.name for field in fields(SchedulerConfig)}
    if unknown := given.keys() - known:
        messages.warn(
            f"Found unsupported keys in the lr scheduler dict: {set(unknown)}; they are ignored",
            RuntimeWarning,
            stacklevel=5,
        )
    if "scheduler" not in given:
        raise error('The lr scheduler dict must have the key "scheduler"', '{"scheduler": ..., "interval": "step"}')
    config = SchedulerConfig(**{key: value for key, value in given.items() if key in known})
    if not automatic:
        if idle := given.keys() & {"reduce_on_plateau", "monitor", "strict"}:
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
    config.reduce_on_plateau = given.get("reduce_on_plateau", isinstance(config.scheduler, ReduceLROnPlateau))
    if config.reduce_on_plateau and config.monitor is None:
        raise error(
            "The lr scheduler dict must include a monitor when a `ReduceLROnPlateau` is used",
            '{"scheduler": scheduler, "monitor": "val_loss"}',
        )
    if isinstance(config.scheduler, OneCycleLR) and config.interval == "epoch":
        messages.warn('OneCycleLR steps by batch, but "interval" is "epoch" here', RuntimeWarning, stacklevel=5)
    return config


def _check(config: SchedulerConfig, optimizers: list[Any], automatic: bool, custom: bool, error: Any) -> None:
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
    if attached is not None and not any(attached is one for one in optimizers):
        raise error(
            f"the lr scheduler {kind} is attached with an optimizer that wasn't returned from configure_optimizers",
            "return both",
        )


def step_schedulers(trainer: Trainer, interval: str, plateau: bool) -> None:
    """Step the learning-rate schedulers whose turn it is.

    Args:
        trainer: Whose training it is.
        interval: "step" or "epoch": what the schedulers to step count.
        plateau: Whether to step those that look at a metric, or the others.
    """
    engine, progress = trainer.engine, trainer.progress
    schedulers = engine.optimizing.schedulers
    if not schedulers or not trainer.model.automatic_optimization:
        return
    own = engine.hooks.of_module("lr_scheduler_step")
    count = progress.batch_idx if interval == "step" else progress.current_epoch + 1
    for config in schedulers:
        if config.interval != interval or config.reduce_on_plateau != plateau or count % config.frequency:
            continue
        value = _monitored(trainer, config) if config.reduce_on_plateau else None
        if config.reduce_on_plateau and value is None:
            continue
        if own is not None:
            own(config.scheduler, value)
        elif value is None:
            config.scheduler.step()
        else:
            config.scheduler.step(value)


def _monitored(trainer: Trainer, config: SchedulerConfig) -> Any:
    """Return the metric that a scheduler looks at; None where it need not be there.

    Raises:
        HastenError: It is not there.
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
        optimizer: Whose parameters.
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
