"""Small values as JSON and back: the types that a checkpoint may hold besides tensors and containers."""

from __future__ import annotations

import datetime
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch

NOT_SAVED = "hasten.NotSaved"  # the key of the dict that represents a NotSaved in a torch file
_PATHS: dict[str, type[PurePath]] = {"Path": Path, "PurePosixPath": PurePosixPath, "PureWindowsPath": PureWindowsPath}
_TIMES: dict[str, Any] = {"datetime": datetime.datetime, "date": datetime.date, "time": datetime.time}
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class NotSaved:
    """Stand-in, in a loaded checkpoint, for a value that cannot be stored without pickle.

    Args:
        type: The value's class, with its module.
        repr: The value's repr, at most 200 characters.
    """

    type: str
    repr: str


def scalar(value: Any) -> tuple[Any, bool]:
    """Return the JSON of a small value and True; or None and False if it is of another type."""
    node: Any = None
    kind = type(value)
    if value is None or kind is bool or kind is str:
        node = value
    elif kind is int:
        node = value if value.bit_length() <= 1024 else {"int": hex(value)}
    elif kind is float:
        # JSON has no NaN or infinity; their bytes keep a NaN's payload.
        node = value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    elif kind is complex:
        node = {"complex": [struct.pack(">d", part).hex() for part in (value.real, value.imag)]}
    elif isinstance(value, _OF_TORCH):
        node = {"torch": str(value).removeprefix("torch.")}
    elif kind is torch.device:
        node = {"device": str(value)}
    elif kind is range:
        node = {"range": [value.start, value.stop, value.step]}
    elif kind is datetime.timedelta:
        node = {"timedelta": [value.days, value.seconds, value.microseconds]}
    elif kind.__name__ in _TIMES and kind is _TIMES[kind.__name__]:
        zone = getattr(value, "tzinfo", None)
        if zone is not None and type(zone) is not datetime.timezone:
            return None, False
        node = {kind.__name__: [value.isoformat(), getattr(value, "fold", 0)]}
    elif isinstance(value, Path):
        node = {"path": ["Path", str(value)]}
    elif kind in (PurePosixPath, PureWindowsPath):
        node = {"path": [kind.__name__, str(value)]}
    elif kind is NotSaved:
        node = {"not_saved": [value.type, value.repr]}
    else:
        return None, False
    return node, True


def _time(kind: str) -> Callable[[Any], Any]:
    """Return the reader for a type of dates or times."""

    def read(inner: Any) -> Any:
        value = _TIMES[kind].fromisoformat(inner[0])
        return value.replace(fold=inner[1]) if inner[1] else value

    return read


def _of_torch(name: str) -> Any:
    """Return the dtype, layout or memory format of this name; refuses any other attribute of torch."""
    value = getattr(torch, name)
    if not isinstance(value, _OF_TORCH):
        raise TypeError(f"torch.{name} is no dtype")
    return value


def _numpy_scalar(inner: Any) -> Any:
    """Return a numpy scalar from its dtype and bytes."""
    dtype = np.dtype(str(inner[0]))
    if dtype.hasobject:
        raise ValueError("a numpy scalar of objects")
    return np.frombuffer(bytes.fromhex(inner[1]), dtype)[0] if dtype.itemsize else np.zeros((), dtype)[()]


def _double(text: str) -> float:
    """Return a float from the hex of its bytes."""
    return float(struct.unpack(">d", bytes.fromhex(text))[0])


READ_SMALL: dict[str, Callable[[Any], Any]] = {
    "int": lambda inner: int(inner, 16),
    "float": _double,
    "complex": lambda inner: complex(_double(inner[0]), _double(inner[1])),
    "torch": _of_torch,
    "device": torch.device,
    "size": torch.Size,
    "range": lambda inner: range(*inner),
    "timedelta": lambda inner: datetime.timedelta(*inner),
    **{kind: _time(kind) for kind in _TIMES},
    "path": lambda inner: _PATHS[inner[0]](inner[1]),
    "not_saved": lambda inner: NotSaved(*inner),
    "scalar": _numpy_scalar,
}


def simplified(value: Any, hashed: bool) -> Any:
    """Return a small value as a type that `torch.load(weights_only=True)` reads."""
    if isinstance(value, NotSaved):
        return str(value) if hashed else {NOT_SAVED: [value.type, value.repr]}
    if isinstance(value, np.generic):
        item = value.item()
        return item if isinstance(item, bool | int | float | complex | str | bytes) else str(value)
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, range):
        return tuple(value) if hashed else list(value)
    if isinstance(value, PurePath | torch.memory_format):
        return str(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return hex(value) if isinstance(value, int) else value  # an int gets here only if it is too long for torch.load


def simple_array(array: np.ndarray[Any, Any]) -> Any:
    """Return a numpy array as a tensor, or as text or lists of text if torch has no such dtype."""
    if array.dtype.kind in "iufc" and array.dtype.itemsize <= 8:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    return str(array.tolist()) if array.dtype.names else array.astype(str).tolist()
