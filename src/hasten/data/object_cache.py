"""Cached samples as live objects: to read one is to copy it, where the store reads and unpickles."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

from hasten.data.opened_files import hear_again, told_by
from hasten.data.round_trip import is_plain_array
from hasten.data.snapshot_parts import ATOMS
from hasten.evidence.machine import memory_free

_MOST, _SHARE = 512 << 20, 8  # bytes that all samples here may take: so many, and one in so many of what is free
_BESIDE = 2000  # bytes of a sample's objects beside its pixels and numbers: measured, with the name of its file
_TRIES = 16  # samples refused one after the other: then no more are looked at
_PIXELS = {"1": 1, "L": 1, "RGB": 4, "RGBA": 4}  # modes without a palette: bytes of a pixel in memory

_alive: weakref.WeakSet[ObjectCache] = weakref.WeakSet()
# How each kind of part is copied; all others are immutable, `_bytes_of` saw to it.
_COPIES: dict[type, Callable[[Any], Any]] = {
    tuple: lambda parts: tuple(map(copy_of, parts)),
    list: lambda parts: list(map(copy_of, parts)),
    dict: lambda parts: {key: copy_of(part) for key, part in parts.items()},
}


class ObjectCache:
    """Samples that a store gave, kept to be copied, with the files that they were made of.

    What it holds is private: only copies are handed out. It is filled in the training's own process alone, as workers
    would each fill memory of their own. What finds no room, and kinds whose copy may not be whole, stay in the store.
    """

    def __init__(self) -> None:
        self._held: dict[Any, tuple[tuple[tuple[str, Any], ...], Any]] = {}
        self._pid = os.getpid()
        self._limit = 0 if _is_in_worker() else min(_MOST, memory_free() // _SHARE)
        self.bytes, self._tries = 0, _TRIES
        _alive.add(self)

    def find(self, place: Any) -> Any:
        """Return what is kept for a place, which is to be copied; None where nothing is, or a file has changed."""
        held = self._held.get(place)
        if held is None:
            return None
        files, sample = held
        for path, told in files:
            if told_by(path) != told:
                self._held.pop(place, None)  # its bytes stay counted: files seldom change
                return None
        hear_again(files)
        return sample

    def add(self, place: Any, files: dict[str, Any], sample: Any) -> bool:
        """Keep a sample that was unpickled and that nobody else holds; False where that cannot be.

        Args:
            place: Under which `find` gives it back.
            files: Path -> what tells the file's contents, of all that the sample was made of.
            sample: The sample, not None.
        """
        if not self._tries or sample is None or os.getpid() != self._pid:
            return False
        size = _bytes_of(sample, set())
        if size < 0 or sum(ready.bytes for ready in _alive) + size + _BESIDE > self._limit:
            self._tries -= 1
            return False
        self.bytes, self._tries = self.bytes + size + _BESIDE, _TRIES
        self._held[place] = tuple(files.items()), sample
        return True

    def clear(self) -> None:
        """Give the memory back."""
        self._held, self.bytes, self._tries = {}, 0, _TRIES


def _is_in_worker() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.utils.data.get_worker_info() is not None


def copy_of(sample: Any) -> Any:
    """Return a copy of a sample that `ObjectCache.add` took: in it, all that can be changed is the caller's own."""
    copy = _COPIES.get(type(sample))
    return sample if copy is None else copy(sample)


def _bytes_of(part: Any, seen: set[int]) -> int:
    """Return how many bytes an unpickled sample's contents take; -1 where `copy_of` may not give the same.

    Two places that hold one list or array would hold two in a copy: such samples, too, are left to the store.
    """
    kind = type(part)
    if kind in ATOMS:
        return sys.getsizeof(part)
    if id(part) in seen:
        return -1
    seen.add(id(part))
    if kind in (tuple, list, dict):
        if kind is dict and not set(map(type, part)) <= ATOMS:
            return -1
        inside = [*part, *part.values()] if kind is dict else part
        sizes = [_bytes_of(one, seen) for one in inside]
        return -1 if -1 in sizes else sys.getsizeof(part) + sum(sizes)
    if kind.__module__ == "PIL.Image" and kind.__name__ == "Image":
        info = [*part.info, *part.info.values()]
        plain = all(type(one) in ATOMS or (type(one) is tuple and set(map(type, one)) <= ATOMS) for one in info)
        if not plain or part.mode not in _PIXELS or part.palette is not None:
            return -1
        _COPIES[kind] = kind.copy
        return int(part.width * part.height * _PIXELS[part.mode] + sum(map(sys.getsizeof, info)))
    if not is_plain_array(part):
        return -1
    if kind.__name__ == "Tensor":
        size = int(part.numel() * part.element_size())
        if part.untyped_storage().nbytes() != size:
            return -1  # gaps, or elements that share memory: a copy may lie otherwise
        _COPIES[kind] = kind.clone
        return size
    if kind.__name__ == "ndarray":
        _COPIES[kind] = _array_copy
        return int(part.nbytes)
    return sys.getsizeof(part)


def _array_copy(array: Any) -> Any:
    return array.copy(order="K")  # as it lies: by columns, where it is so
