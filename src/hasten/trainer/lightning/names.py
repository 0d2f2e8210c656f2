"""Lightning's own classes, looked up in the packages that the process has imported. Never imports Lightning."""

from __future__ import annotations

import functools
import sys
from typing import Any

from hasten.errors import HastenError

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def packages() -> list[Any]:
    """Return the Lightning packages that this process has imported."""
    return [sys.modules[name] for name in _NAMES if name in sys.modules]


def is_lightning(value: Any) -> bool:
    """Return whether an object's class derives from one of Lightning's."""
    return any(kind.__module__.startswith(_NAMES) for kind in type(value).__mro__)


def _exceptions() -> tuple[type[Exception], ...]:
    """Return Lightning's MisconfigurationException classes."""
    modules = ("lightning.fabric.utilities.exceptions", "lightning_fabric.utilities.exceptions")
    return tuple(sys.modules[module].MisconfigurationException for module in modules if module in sys.modules)


def misconfigured(message: str, fix: str = "") -> HastenError:
    """Return a HastenError that is also Lightning's MisconfigurationException."""
    error: HastenError = _error_class(_exceptions())(message, fix)
    return error


@functools.cache
def _error_class(bases: tuple[type[Exception], ...]) -> Any:
    """Return the class of such errors."""
    return type("MisconfigurationError", (HastenError, *bases), {})


def uploads(logger: Any) -> bool:
    """Return whether one of Lightning's loggers uploads each checkpoint as soon as it is saved."""
    return bool(getattr(logger, "_log_model", False) or getattr(logger, "_log_model_checkpoints", False))
