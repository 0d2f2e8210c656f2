"""What a Trainer comes with: callbacks, loggers, a profiler; those given and those by default."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.trainer.flags import misconfigured, seconds, uses_lightning

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer


_LOGGER_NEEDS = ("log_hyperparams", "save", "finalize", "after_save_checkpoint")


def _is(callback: Any, *names: str) -> bool:
    """Whether a callback is of one of these classes, hasten's or Lightning's."""
    return any(kind.__name__ in names for kind in type(callback).__mro__)


@dataclass
class Attachments:
    """The arguments that decide about callbacks, loggers and profiler."""

    given_callbacks: Any
    logger: Any
    enable_checkpointing: bool | None
    enable_progress_bar: bool | None
    enable_model_summary: bool | None
    max_time: Any
    schedule: dict[int, int] | None
    given_profiler: Any

    def loggers(self, trainer: Trainer) -> list[Any]:
        """The loggers."""
        if self.logger is False:
            return []
        if self.logger is None or self.logger is True:
            if trainer.barebones:
                return []
            if uses_lightning():
                from hasten.trainer.lightning import default_logger

                return [default_logger(trainer.default_root_dir)]
            from hasten.trainer.loggers import CSVLogger

            return [CSVLogger(trainer.default_root_dir)]
        several = isinstance(self.logger, Iterable) and not isinstance(self.logger, str)
        found = list(self.logger) if several and not hasattr(self.logger, "log_metrics") else [self.logger]
        for logger in found:
            if isinstance(logger, type) or not hasattr(logger, "log_metrics"):
                raise misconfigured(
                    f"logger={logger!r} is no logger", "give one (CSVLogger(...)), several, True or False"
                )
            if missing := [name for name in _LOGGER_NEEDS if not hasattr(logger, name)]:
                raise misconfigured(
                    f"the logger {type(logger).__name__} has no {', '.join(missing)}",
                    "derive it from hasten.loggers.Logger",
                )
        return found

    def profiler(self) -> Any:
        """The profiler, or None."""
        given = self.given_profiler
        from hasten.trainer.profiling import PROFILERS, NoProfiler

        if given is not None and not isinstance(given, str):
            if not hasattr(given, "profile"):
                raise misconfigured(f"profiler={given!r} is no profiler", f"there are: {', '.join(PROFILERS)}")
            return given
        known: dict[str, Any] = PROFILERS
        nothing: Any = NoProfiler
        if uses_lightning():
            from hasten.trainer.lightning import profilers

            known, nothing = profilers()
        if given is None:
            return nothing()
        if given.lower() not in known:
            raise misconfigured(
                "When passing string value for the `profiler` parameter of `Trainer`, it can only be one of"
                f" {', '.join(known)}, and not {given!r}"
            )
        return known[given.lower()]()

    def callbacks(self, trainer: Trainer) -> list[Any]:
        """The callbacks: those given, those by default, and checkpoints last, so that they save what others did."""
        from hasten.trainer.callbacks import (
            GradientAccumulationScheduler,
            ModelCheckpoint,
            ModelSummary,
            Progress,
            Timer,
        )

        given = self.given_callbacks
        found = [] if given is None else list(given) if isinstance(given, list | tuple | set) else [given]
        for one in found:
            if isinstance(one, type) or not any(name.startswith(("on_", "setup")) for name in dir(one)):
                raise misconfigured(
                    f"callbacks has {one!r}, which is no callback",
                    f"give one that is built: {one.__name__}(...)" if isinstance(one, type) else "see hasten.callbacks",
                )
        checkpoints = [one for one in found if _is(one, "Checkpoint", "ModelCheckpoint")]
        bars = [one for one in found if _is(one, "Progress", "ProgressBar")]
        summaries = [one for one in found if _is(one, "ModelSummary")]
        if checkpoints and self.enable_checkpointing is False:
            if trainer.fast_dev_run:
                found = [one for one in found if one not in checkpoints]
                checkpoints = []
            else:
                raise misconfigured(
                    f"`enable_checkpointing=False` but found `{type(checkpoints[0]).__name__}` in callbacks",
                    "drop one of them",
                )
        if len(bars) > 1:
            raise misconfigured(
                f"You added multiple progress bar callbacks: {', '.join(type(bar).__name__ for bar in bars)}",
                "keep one of them",
            )
        if bars and self.enable_progress_bar is False:
            raise misconfigured(
                f"`enable_progress_bar=False` but found `{type(bars[0]).__name__}` in callbacks", "drop one of them"
            )
        if not bars and self.enable_progress_bar is not False:
            found.append(Progress())
        if not summaries and self.enable_model_summary is not False:
            if uses_lightning():
                from hasten.trainer.lightning import default_summary

                found.append(default_summary(bars))
            else:
                found.append(ModelSummary())
        if self.max_time is not None:
            if (limit := seconds("max_time", self.max_time)) is not None and not any(
                _is(one, "Timer") for one in found
            ):
                from datetime import timedelta

                found.append(Timer(duration=timedelta(seconds=limit)))
        if self.schedule is not None:
            if any(_is(one, "GradientAccumulationScheduler") for one in found):
                raise misconfigured(
                    "accumulate_grad_batches is a schedule, and callbacks has a GradientAccumulationScheduler too",
                    "drop one of them",
                )
            found.append(GradientAccumulationScheduler(scheduling=self.schedule))
        if not checkpoints and self.enable_checkpointing is not False and not trainer.fast_dev_run:
            found.append(ModelCheckpoint())
        check_unique(found)
        return in_order(found)


def in_order(callbacks: list[Any]) -> list[Any]:
    """Checkpoints last; behind them only what measures steps, so that it sees how long a save took."""
    checkpoints = [one for one in callbacks if _is(one, "Checkpoint", "ModelCheckpoint")]
    clocks = [one for one in callbacks if _is(one, "StepClock")]
    return [one for one in callbacks if one not in checkpoints and one not in clocks] + checkpoints + clocks


def check_unique(callbacks: list[Any]) -> None:
    """Callbacks whose state would be saved under one name lose it."""
    seen: dict[str, Any] = {}
    for callback in callbacks:
        has_state = type(callback).__dict__.get("state_dict") is not None
        key = getattr(callback, "state_key", type(callback).__qualname__)
        if has_state and key in seen and type(seen[key]) is type(callback):
            raise RuntimeError(
                f"Found more than one stateful callback of type `{type(callback).__name__}` with the state_key"
                f" {key!r}: their states in a checkpoint cannot be told apart; give them different arguments or a"
                " state_key of their own"
            )
        seen[key] = callback


def with_module_callbacks(trainer: Trainer, brought: Any) -> None:
    """Add the callbacks that a module brings; one of a kind replaces the Trainer's of the same kind."""
    if not brought:
        return
    brought = list(brought) if isinstance(brought, list | tuple) else [brought]
    kinds = {type(one) for one in brought}
    replaced = {kind for kind in (type(one) for one in trainer.callbacks) if kind in kinds}
    if replaced:
        trainer.say(
            "callbacks of the module replace the Trainer's: " + ", ".join(sorted(kind.__name__ for kind in replaced))
        )
    trainer.callbacks = in_order([one for one in trainer.callbacks if type(one) not in replaced] + brought)


class Silent:
    """A logger that logs nothing, for `fast_dev_run`: whatever is called on it, or on its experiment, does nothing."""

    name = version = save_dir = root_dir = log_dir = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Silent:
        return self

    def __getitem__(self, key: Any) -> Silent:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def save(self) -> None:
        """Nothing."""

    def finalize(self, status: str) -> None:
        """Nothing."""


def silent() -> Any:
    """The logger for `fast_dev_run`."""
    if uses_lightning():
        from hasten.trainer.lightning import silent_logger

        return silent_logger()
    return Silent()


def folder_of(logger: Any, default: str) -> str:
    """The folder a logger writes to."""
    found = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None) or default
    return str(Path(found))
