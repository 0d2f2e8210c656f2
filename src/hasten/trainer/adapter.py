"""Adapter: how modules, callbacks and loggers written for another framework work under hasten's Trainer.

Its base, which does nothing, is what the Trainer has where no such framework is imported.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from hasten.errors import HastenError

if TYPE_CHECKING:
    from hasten.trainer.progress import Progress
    from hasten.trainer.trainer import Trainer


class Guest:
    """Additions to a run in which something was written for another framework: here none."""

    moves_batches = False
    """Whether batches go through `.to` on a CPU too."""
    loads_callbacks = False
    """Whether callbacks hear of a checkpoint that is loaded for an evaluation, too."""

    def before_profiling(self) -> None:
        """The profiler is about to be set up."""

    def before_setup(self) -> None:
        """The first hook is about to be called."""

    def is_leaving(self, error: BaseException) -> bool:
        """Return whether an exception is a callback's way to end a run that was only for itself."""
        return False

    def optimizers(self, counted: list[Any]) -> list[Any]:
        """Return the optimizers as the module gets them, from those that hasten counts the steps of."""
        return counted

    def scheduler_configs(self, configs: list[Any]) -> list[Any]:
        """Return the schedulers as the module gets them."""
        return configs

    def draw_for_reload(self, leaves: list[Any]) -> None:
        """Draw the random numbers that the framework draws when loaders are asked for again."""

    def saved(self, state: dict[str, Any], weights_only: bool) -> None:
        """Add to a checkpoint what the framework looks for in it."""

    def restore(self, state: dict[str, Any]) -> None:
        """Take it back from a checkpoint, when optimizers and counters are restored."""


class Adapter:
    """Answers to hasten's Trainer about the framework in use: here there is none."""

    warning: type[Warning] = UserWarning
    """The category of warnings about what may be meant: what people filter."""
    name = "another tool"
    """The framework's name, for messages."""
    log_name = "hasten"
    """The name under which the Trainer logs."""
    owners = ("Module", "DataModule")
    """Names of modules and datamodules in a profile."""
    kinds_of_module = "`hasten.Module`"
    """Kinds of models, for messages."""

    def in_use(self) -> bool:
        """Return whether this process has imported the framework."""
        return True

    def bases(self, what: str) -> tuple[type, ...]:
        """Return classes whose methods are defaults, of a "module", "callback" or "datamodule"."""
        return ()

    def error(self, message: str, fix: str = "") -> HastenError:
        """Return the error for what contradicts itself."""
        return HastenError(message, fix)

    def stopped(self, kind: type[SystemExit]) -> type[SystemExit]:
        """Return the exception for a training that SIGTERM ended."""
        return kind

    def environment_flags(self, kind: str, given: Collection[str]) -> dict[str, tuple[str, Any]]:
        """Return flags that the framework takes from the environment: variable and value, by the flag's name.

        Args:
            kind: Name of the Trainer's class.
            given: Flags that the script gives.
        """
        return {}

    def default_logger(self, root: str) -> Any:
        """Return the logger of a Trainer that was given none; None: hasten's own."""
        return None

    def silent_logger(self) -> Any:
        """Return the logger for `fast_dev_run`; None: hasten's own."""
        return None

    def profilers(self) -> tuple[dict[str, Any], Any] | None:
        """Return the profilers by their names, and the one that does nothing; None: hasten's own."""
        return None

    def default_progress(self) -> Any:
        """Return the callback that shows progress; None: hasten's own."""
        return None

    def default_summary(self, bars: list[Any]) -> Any:
        """Return the callback that shows the model beside these progress bars; None: hasten's own."""
        return None

    def strategy(self, strategy: Any) -> tuple[str, dict[str, Any]] | None:
        """Return what a strategy object comes to: "auto", "ddp" or "fsdp", and its options; None where hasten has none.

        Raises:
            HastenError: hasten has it, but not one of its options.
        """
        return None

    def guest(self, trainer: Trainer) -> Guest:
        """Return what this run needs."""
        return Guest()

    def attribute(self, trainer: Trainer, name: str) -> Any:
        """Return what the framework's own classes read of their trainer.

        Raises:
            AttributeError: They read no such thing.
        """
        raise AttributeError(f"Trainer has no attribute {name!r}")

    def wrote(self, state: dict[str, Any]) -> bool:
        """Return whether a checkpoint is of this framework."""
        return True

    def epochs_done(self, state: dict[str, Any], progress: Progress) -> int:
        """Return the epochs that are done in a checkpoint that hasten did not write; counters go to `progress`."""
        return int(state.get("epoch", 0))


_PLAIN = Adapter()
_offered: list[Adapter] = []


def offer(known: Adapter) -> None:
    """Have the Trainer use an adapter wherever its framework is in use."""
    _offered.append(known)


def adapter() -> Adapter:
    """Return the adapter of the framework that this process has imported, or the base."""
    return next((known for known in _offered if known.in_use()), _PLAIN)


def offered() -> list[Adapter]:
    """Return all adapters, in use or not: a checkpoint may be from a framework that is not imported here."""
    return [*_offered, _PLAIN]
