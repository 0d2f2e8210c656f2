"""Learning-rate schedulers: which of them step now, and with which metric."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten import messages

if TYPE_CHECKING:
    from hasten.trainer.optimizing import SchedulerConfig
    from hasten.trainer.trainer import Trainer


def update(trainer: Trainer, interval: str, plateau: bool) -> None:
    """Step those whose turn it is.

    Args:
        trainer: Whose training it is.
        interval: Those that count "step" or "epoch".
        plateau: Those that look at a metric, or the others.
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
