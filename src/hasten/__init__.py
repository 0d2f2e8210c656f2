"""hasten makes PyTorch training finish sooner, and proves it."""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING, Any

from hasten.errors import HastenError
from hasten.plan import Plan

if TYPE_CHECKING:
    from hasten import callbacks, loggers, nn
    from hasten.by_hand import autocast, backward, setup
    from hasten.trainer import Module, Trainer, seed_everything

    __version__: str

__all__ = [
    "HastenError",
    "Module",
    "Plan",
    "Trainer",
    "__version__",
    "autocast",
    "backward",
    "callbacks",
    "loggers",
    "nn",
    "seed_everything",
    "setup",
]

_LATE = {
    "Module": "hasten.trainer",
    "Trainer": "hasten.trainer",
    "seed_everything": "hasten.trainer",
    "autocast": "hasten.by_hand",
    "backward": "hasten.by_hand",
    "callbacks": "hasten.callbacks",
    "loggers": "hasten.loggers",
    "nn": "hasten.nn",
    "setup": "hasten.by_hand",
}


def _imported(name: str) -> Any:
    """Import without a garbage collection in between: after torch's import one takes longer than all of hasten."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if collects:
            gc.enable()


def _installed_version() -> str:
    """Return the version that was installed, which the build took from the newest tag."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("hasten")
    except PackageNotFoundError:  # run from a checkout that was never installed: PYTHONPATH=src python -m hasten
        return "0+unknown"


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first used: the command's `--help` must not wait for torch."""
    if name == "__version__":
        globals()[name] = _installed_version()
        return globals()[name]
    if name not in _LATE:
        raise AttributeError(f"module 'hasten' has no attribute {name!r}")
    module = _imported(_LATE[name])
    value = module if _LATE[name].endswith(name) else getattr(module, name)
    globals()[name] = value
    return value
