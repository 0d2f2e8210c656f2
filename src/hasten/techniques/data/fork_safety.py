"""Find what in a dataset must not cross a fork into a worker: open files, database handles, tensors on a device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

_OPEN = {
    "sqlite3.Connection",
    "sqlite3.Cursor",
    "h5py._hl.files.File",
    "h5py._hl.dataset.Dataset",
    "zipfile.ZipFile",
    "tarfile.TarFile",
    "lmdb.Environment",
    "builtins.Environment",
}  # fmt: skip  (the last is lmdb's too)
_CLOSED = (str, bytes, int, float, type(None), type, ModuleType, FunctionType)  # not looked into
_LIBRARIES = ("logging", "hasten.")  # modules whose objects are not looked into
LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")
"""Most characters of the temporary folder's path: the sockets of workers are below it, and have at most 107."""
_DEPTH, _MOST, _FIRST = 8, 2000, 16  # limits of `parts_of`: levels, objects, elements of a list


def holds_open(dataset: Any) -> str:
    """Return what a dataset holds that must not cross a fork: "holds an open sqlite3.Connection (.db)", or ""."""
    import io
    import sys

    for name, value in parts_of(dataset):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if any(value is stream for stream in (sys.stdin, sys.stdout, sys.stderr)):
            continue
        if kind in _OPEN or (isinstance(value, io.IOBase) and not isinstance(value, io.BytesIO | io.StringIO)):
            return f"holds an open {kind.removeprefix('builtins.')} (.{name})"
    return holds_on_device(dataset)


def no_room_for_sockets() -> str:
    """Return why workers could not create their sockets, so that a loader would wait for ever; "" if they can."""
    import os
    import tempfile
    from multiprocessing import process

    if process.current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
        return ""  # multiprocessing has its own folder already: in a trial, or after the first workers
    length = len(os.fsencode(tempfile.gettempdir()))
    if length <= LONGEST_FOLDER:
        return ""
    return (
        f"the temporary folder's name has {length} letters, and workers' sockets below it need one of at most "
        f"{LONGEST_FOLDER}: set TMPDIR to a shorter one"
    )


def holds_on_device(dataset: Any) -> str:
    """Return which tensor on a device a dataset holds ("holds a tensor on cuda (.x)"), or ""."""
    import torch

    for name, value in parts_of(dataset):
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            return f"holds a tensor on {value.device.type} (.{name})"
    return ""


def parts_of(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield (attribute, object) for what a dataset holds: objects inside objects, the first elements of lists."""
    queue: list[tuple[str, Any, int]] = [("", dataset, 0)]
    seen: set[int] = set()
    for name, value, depth in queue:  # the queue grows in the loop
        inside = getattr(value, "__dict__", {})
        if id(value) in seen or isinstance(value, _CLOSED) or type(value).__module__.startswith(_LIBRARIES):
            continue
        seen.add(id(value))
        yield name, value
        if depth == _DEPTH or len(seen) > _MOST:
            continue
        if isinstance(value, list | tuple | dict):
            first = islice(value.values() if isinstance(value, dict) else value, _FIRST)
            queue += [(name, element, depth + 1) for element in first]
        queue += [(key, part, depth + 1) for key, part in inside.items()]
