"""Lightning's own classes: found in the packages that the process has imported, never imported from here."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

from hasten.errors import HastenError

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def packages() -> list[Any]:
    """Lightning, under the names by which this process has imported it."""
    return [sys.modules[name] for name in _NAMES if name in sys.modules]


def is_lightning(thing: Any) -> bool:
    """Whether an object is of a class that derives from one of Lightning's."""
    return any(kind.__module__.startswith(_NAMES) for kind in type(thing).__mro__)


def bases(what: str) -> tuple[type, ...]:
    """Lightning's classes whose methods are defaults.

    Args:
        what: "module", "callback" or "datamodule".
    """
    found: list[type] = []
    for package in packages():
        core = sys.modules.get(f"{package.__name__}.core.hooks")
        data = [core.DataHooks, core.CheckpointHooks] if core else []
        if what == "module":
            found += [package.LightningModule, *([core.ModelHooks] if core else []), *data]
        elif what == "callback":
            found.append(package.Callback)
        else:
            found += [package.LightningDataModule, *data]
    return tuple(found)


def _exceptions() -> tuple[type[Exception], ...]:
    rooms = ("lightning.fabric.utilities.exceptions", "lightning_fabric.utilities.exceptions")
    return tuple(sys.modules[room].MisconfigurationException for room in rooms if room in sys.modules)


def warning_kind() -> type[Warning]:
    """Lightning's category for warnings about what may be meant."""
    rooms = ("lightning.fabric.utilities.warnings", "lightning_fabric.utilities.warnings")
    return next((sys.modules[room].PossibleUserWarning for room in rooms if room in sys.modules), UserWarning)


def stopped_kind(kind: type[SystemExit]) -> type[SystemExit]:
    """The exception for a training that SIGTERM ended, which is Lightning's too."""
    kinds = [sys.modules[f"{package.__name__}.utilities.exceptions"].SIGTERMException for package in packages()]
    return type("Stopped", (kind, *dict.fromkeys(kinds)), {})


def misconfigured(message: str, fix: str = "") -> HastenError:
    """A HastenError that is Lightning's MisconfigurationException too."""
    error: HastenError = _made(_exceptions())(message, fix)
    return error


@functools.cache
def _made(kinds: tuple[type[Exception], ...]) -> Any:
    return type("MisconfigurationError", (HastenError, *kinds), {})


def default_logger(root: str) -> Any:
    """The logger that a script written for Lightning expects: TensorBoard where it is installed, else CSV."""
    package = packages()[0]
    loggers = importlib.import_module(f"{package.__name__}.loggers")
    try:
        return loggers.TensorBoardLogger(root)
    except ModuleNotFoundError:
        return loggers.CSVLogger(root)


def silent_logger() -> Any:
    """Lightning's logger that logs nothing."""
    return importlib.import_module(f"{packages()[0].__name__}.loggers.logger").DummyLogger()


def profilers() -> tuple[dict[str, Any], Any]:
    """Lightning's profilers by their names, and the one that does nothing."""
    room = importlib.import_module(f"{packages()[0].__name__}.profilers")
    named = {"simple": room.SimpleProfiler, "advanced": room.AdvancedProfiler, "pytorch": room.PyTorchProfiler}
    return named, room.PassThroughProfiler


def default_summary(bars: list[Any]) -> Any:
    """Lightning's summary of a model; the one made with rich beside its progress bar made with rich."""
    callbacks = packages()[0].callbacks
    rich = any(isinstance(bar, package.callbacks.RichProgressBar) for bar in bars for package in packages())
    return callbacks.RichModelSummary() if rich else callbacks.ModelSummary()


def uploads(logger: Any) -> bool:
    """Whether a logger of Lightning takes each checkpoint away as soon as it is there."""
    return bool(getattr(logger, "_log_model", False) or getattr(logger, "_log_model_checkpoints", False))
