"""Builds a Trainer's callbacks, loggers and profiler: those given by flags, and the defaults."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.trainer.adapter import adapter
from hasten.trainer.callbacks import GradientAccumulationScheduler, ModelCheckpoint, ModelSummary, Progress, Timer
from hasten.trainer.callbacks.base import callbacks_named, state_key
from hasten.trainer.errors import misconfigured
from hasten.trainer.flag_values import seconds
from hasten.trainer.loggers import CSVLogger
from hasten.trainer.loggers.base import NoOpExperiment
from hasten.trainer.profiling import PROFILERS, NoProfiler

if TYPE_CHECKING:
    from hasten.trainer.config import Config
    from hasten.trainer.trainer import Trainer


_SAVING = ("Checkpoint", "ModelCheckpoint")
_LOGGER_NEEDS = ("log_hyperparams", "save", "finalize", "after_save_checkpoint")


class Attachments:
    """Builds callbacks, loggers and profiler from the flags.

    Args:
        given: The flags as given by the user: needed to tell a contradiction (`enable_checkpointing=False` with a
            ModelCheckpoint) from a consequence.
        config: The settled flags: `fast_dev_run`, for example, has turned checkpoints off.
    """

    def __init__(self, user_config: Config, config: Config) -> None:
        self._user_config, self._config = user_config, config

    def loggers(self) -> list[Any]:
        """Return the loggers given by the flag, or the default logger."""
        config, logger = self._config, self._config.logger
        if logger is False:
            return []
        if config.fast_dev_run:
            return [adapter().silent_logger() or SilentLogger()]
        if logger is None or logger is True:
            return [_default_logger(str(config.default_root_dir))]
        several = isinstance(logger, Iterable) and not isinstance(logger, str)
        loggers = list(logger) if several and not hasattr(logger, "log_metrics") else [logger]
        for logger in loggers:
            if isinstance(logger, type) or not hasattr(logger, "log_metrics"):
                raise misconfigured(
                    f"logger={logger!r} is no logger", "give one (CSVLogger(...)), several, True or False"
                )
            if missing := [name for name in _LOGGER_NEEDS if not hasattr(logger, name)]:
                raise misconfigured(
                    f"the logger {type(logger).__name__} has no {', '.join(missing)}",
                    "derive it from hasten.loggers.Logger",
                )
        return loggers

    def profiler(self) -> Any:
        """Return the profiler; by default, a profiler that does nothing."""
        profiler = self._config.profiler
        if profiler is not None and not isinstance(profiler, str):
            if not hasattr(profiler, "profile"):
                raise misconfigured(f"profiler={profiler!r} is no profiler", f"there are: {', '.join(PROFILERS)}")
            return profiler
        known, nothing = adapter().profilers() or (PROFILERS, NoProfiler)
        if profiler is None:
            return nothing()
        if profiler.lower() not in known:
            raise misconfigured(
                "When passing string value for the `profiler` parameter of `Trainer`, it can only be one of"
                f" {', '.join(known)}, and not {profiler!r}"
            )
        return known[profiler.lower()]()

    def callbacks(self) -> list[Any]:
        """Return the given and default callbacks, checkpoints last, so that they save the others' up-to-date state."""
        callbacks = _listed(self._user_config.callbacks)
        callbacks = self._without_checkpoints(callbacks)
        self._add_shown(callbacks)
        self._add_by_flag(callbacks)
        if not callbacks_named(callbacks, *_SAVING) and self._config.enable_checkpointing is not False:
            callbacks.append(ModelCheckpoint())
        check_unique(callbacks)
        return in_order(callbacks)

    def _without_checkpoints(self, callbacks: list[Any]) -> list[Any]:
        """Drop checkpoint callbacks under `fast_dev_run`; raise if `enable_checkpointing=False` contradicts them."""
        saving = callbacks_named(callbacks, *_SAVING)
        if not saving or self._config.enable_checkpointing is not False:
            return callbacks
        if not self._config.fast_dev_run:
            raise misconfigured(
                f"`enable_checkpointing=False` but found `{type(saving[0]).__name__}` in callbacks", "drop one of them"
            )
        return [callback for callback in callbacks if callback not in saving]

    def _add_shown(self, callbacks: list[Any]) -> None:
        """Add the default callbacks that show progress and the model summary."""
        config = self._config
        bars = callbacks_named(callbacks, "Progress", "ProgressBar")
        if len(bars) > 1:
            raise misconfigured(
                f"You added multiple progress bar callbacks: {', '.join(type(bar).__name__ for bar in bars)}",
                "keep one of them",
            )
        if bars and config.enable_progress_bar is False:
            raise misconfigured(
                f"`enable_progress_bar=False` but found `{type(bars[0]).__name__}` in callbacks", "drop one of them"
            )
        if not bars and config.enable_progress_bar is not False:
            callbacks.append(adapter().default_progress() or Progress())
        if not callbacks_named(callbacks, "ModelSummary") and config.enable_model_summary is not False:
            callbacks.append(adapter().default_summary(bars) or ModelSummary())

    def _add_by_flag(self, callbacks: list[Any]) -> None:
        """Add the callbacks that implement `max_time` and a schedule for `accumulate_grad_batches`."""
        limit = seconds("max_time", self._config.max_time)
        if limit is not None and not callbacks_named(callbacks, "Timer"):
            callbacks.append(Timer(duration=timedelta(seconds=limit)))
        schedule = self._user_config.accumulate_grad_batches
        if isinstance(schedule, dict):
            if callbacks_named(callbacks, "GradientAccumulationScheduler"):
                raise misconfigured(
                    "accumulate_grad_batches is a schedule, and callbacks has a GradientAccumulationScheduler too",
                    "drop one of them",
                )
            callbacks.append(GradientAccumulationScheduler(scheduling=schedule))


def _default_logger(root: str) -> Any:
    own = adapter().default_logger(root)
    return CSVLogger(root) if own is None else own


def _listed(value: Any) -> list[Any]:
    """Return the given callbacks as a list; raise if one is not a callback."""
    callbacks = [] if value is None else list(value) if isinstance(value, list | tuple | set) else [value]
    for callback in callbacks:
        if isinstance(callback, type) or not any(name.startswith(("on_", "setup")) for name in dir(callback)):
            hint = f"give one that is built: {callback.__name__}(...)" if isinstance(callback, type) else ""
            raise misconfigured(f"callbacks has {callback!r}, which is no callback", hint or "see hasten.callbacks")
    return callbacks


def in_order(callbacks: list[Any]) -> list[Any]:
    """Return the callbacks with checkpoints last, followed only by step clocks, which time steps including saves."""
    saving, clocks = callbacks_named(callbacks, *_SAVING), callbacks_named(callbacks, "StepClock")
    return [callback for callback in callbacks if callback not in saving and callback not in clocks] + saving + clocks


def check_unique(callbacks: list[Any]) -> None:
    """Raise if two callbacks would save their states under the same key, so that one is lost."""
    seen: dict[str, Any] = {}
    for callback in callbacks:
        has_state = type(callback).__dict__.get("state_dict") is not None
        key = state_key(callback)
        if has_state and key in seen and type(seen[key]) is type(callback):
            raise RuntimeError(
                f"Found more than one stateful callback of type `{type(callback).__name__}` with the state_key"
                f" {key!r}: their states in a checkpoint cannot be told apart; give them different arguments or a"
                " state_key of their own"
            )
        seen[key] = callback


def with_module_callbacks(trainer: Trainer, brought: Any) -> None:
    """Add the module's callbacks; they replace the Trainer's callbacks of the same class."""
    if not brought:
        return
    brought = list(brought) if isinstance(brought, list | tuple) else [brought]
    kinds = {type(callback) for callback in brought}
    replaced = {kind for kind in (type(callback) for callback in trainer.callbacks) if kind in kinds}
    if replaced:
        trainer.say(
            "callbacks of the module replace the Trainer's: " + ", ".join(sorted(kind.__name__ for kind in replaced))
        )
    trainer.callbacks[:] = in_order(
        [callback for callback in trainer.callbacks if type(callback) not in replaced] + brought
    )


class SilentLogger(NoOpExperiment):
    """A logger for `fast_dev_run`: any method called on it, or on its experiment, does nothing."""

    name = version = save_dir = root_dir = log_dir = None

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def folder_of(logger: Any, default: str) -> str:
    """Return the folder that a logger writes to."""
    folder = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None) or default
    return str(Path(folder))
