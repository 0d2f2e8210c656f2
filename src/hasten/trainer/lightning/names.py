"""Lightning's own classes: found in the packages that the process has imported, never imported from here."""

from __future__ import annotations

import functools
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


def _exceptions() -> tuple[type[Exception], ...]:
    rooms = ("lightning.fabric.utilities.exceptions", "lightning_fabric.utilities.exceptions")
    return tuple(sys.modules[room].MisconfigurationException for room in rooms if room in sys.modules)


def misconfigured(message: str, fix: str = "") -> HastenError:
    """A HastenError that is Lightning's MisconfigurationException too."""
    error: HastenError = _made(_exceptions())(message, fix)
    return error


@functools.cache
def _made(kinds: tuple[type[Exception], ...]) -> Any:
    return type("MisconfigurationError", (HastenError, *kinds), {})


def uploads(logger: Any) -> bool:
    """Whether a logger of Lightning takes each checkpoint away as soon as it is there."""
    return bool(getattr(logger, "_log_model", False) or getattr(logger, "_log_model_checkpoints", False))
