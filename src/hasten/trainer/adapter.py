"""Adapter: lets modules, callbacks and loggers written for another framework work under hasten's Trainer.

The Trainer asks `adapter()` wherever a framework may want something else, and a `Guest` for one run. The base classes
do nothing; the Trainer uses them if no such framework is imported.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from hasten.errors import HastenError

if TYPE_CHECKING:
    from hasten.trainer.progress import Progress
    from hasten.trainer.trainer import Trainer


class Guest:
    """Additions to a run whose module or callbacks were written for another framework; this base adds none."""

    moves_batches = False
    """Whether batches are moved with `.to` even on a CPU."""
    loads_callbacks = False
    """Whether callbacks are also told of a checkpoint that is loaded for an evaluation."""

    def before_profiling(self) -> None:
        """Called before the profiler is set up."""

    def before_setup(self) -> None:
        """Called before the first hook of a run."""

    def is_leaving(self, error: BaseException) -> bool:
        """Return whether an exception is how a callback ends a run that it started for its own purpose (a tuner)."""
        return False

    def optimizers(self, counted: list[Any]) -> list[Any]:
        """Return the optimizers for the module, made from hasten's step-counting wrappers."""
        return counted

    def scheduler_configs(self, configs: list[Any]) -> list[Any]:
        """Return the scheduler configs for the module."""
        return configs

    def draw_for_reload(self, leaves: list[Any]) -> None:
        """Draw the random numbers that the framework draws when loaders are reloaded, so that later draws match."""

    def saved(self, state: dict[str, Any], weights_only: bool) -> None:
        """Add the framework's own entries to a checkpoint."""

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the framework's entries from a checkpoint, together with optimizers and counters."""


class Adapter:
    """What the Trainer needs to know about the framework in use; this base: no framework."""

    warning: type[Warning] = UserWarning
    """Category of the Trainer's warnings, so that the framework's warning filters apply."""
    name = "another tool"
    """Name of the framework, for messages."""
    log_name = "hasten"
    """Name of the `logging` logger that the Trainer writes to."""
    owners = ("Module", "DataModule")
    """Labels of modules and datamodules in a profile."""
    kinds_of_module = "`hasten.Module`"
    """The kinds of models accepted, for messages."""

    def in_use(self) -> bool:
        """Return whether this process has imported the framework."""
        return True

    def bases(self, kind: str) -> tuple[type, ...]:
        """Return the framework's classes whose methods are defaults, for a "module", "callback" or "datamodule"."""
        return ()

    def error(self, message: str, fix: str = "") -> HastenError:
        """Return the error for flags and modules that contradict themselves."""
        return HastenError(message, fix)

    def stopped(self, kind: type[SystemExit]) -> type[SystemExit]:
        """Return the exception for a training that SIGTERM ended, derived from `kind`."""
        return kind

    def environment_flags(self, kind: str, given_flags: Collection[str]) -> dict[str, tuple[str, Any]]:
        """Return the flags that environment variables of the framework set: flag -> (variable, value).

        Args:
            kind: Name of the Trainer's class.
            given_flags: Names of the flags that the script gives.
        """
        return {}

    def default_logger(self, root: str) -> Any:
        """Return the default logger; None: hasten's."""
        return None

    def silent_logger(self) -> Any:
        """Return the logger for `fast_dev_run`; None: hasten's."""
        return None

    def profilers(self) -> tuple[dict[str, Any], Any] | None:
        """Return the profilers by name, and the profiler that does nothing; None: hasten's."""
        return None

    def default_progress(self) -> Any:
        """Return the default callback that shows progress; None: hasten's."""
        return None

    def default_summary(self, bars: list[Any]) -> Any:
        """Return the default callback that shows the model summary, matching the progress bars; None: hasten's."""
        return None

    def strategy(self, strategy: Any) -> tuple[str, dict[str, Any]] | None:
        """Translate a strategy object of the framework to "auto", "ddp" or "fsdp" and options; None if hasten lacks it.

        Raises:
            HastenError: hasten has the strategy, but not one of the object's options.
        """
        return None

    def guest(self, trainer: Trainer) -> Guest:
        """Return the additions that this run needs."""
        return Guest()

    def attribute(self, trainer: Trainer, name: str) -> Any:
        """Return an attribute that the framework's classes read from their trainer.

        Raises:
            AttributeError: They read no such attribute.
        """
        raise AttributeError(f"Trainer has no attribute {name!r}")

    def wrote(self, state: dict[str, Any]) -> bool:
        """Return whether this framework wrote a checkpoint."""
        return True

    def epochs_done(self, state: dict[str, Any], progress: Progress) -> int:
        """Return the finished epochs of a checkpoint that hasten did not write; set `progress`'s other counters."""
        return int(state.get("epoch", 0))


_PLAIN = Adapter()
_offered: list[Adapter] = []


def offer(known: Adapter) -> None:
    """Register an adapter; the Trainer uses it in processes that import its framework."""
    _offered.append(known)


def adapter() -> Adapter:
    """Return the adapter of the framework that this process has imported, or else the base."""
    return next((known for known in _offered if known.in_use()), _PLAIN)


def offered() -> list[Adapter]:
    """Return all adapters, in use or not: a checkpoint may come from a framework that is not imported here."""
    return [*_offered, _PLAIN]
