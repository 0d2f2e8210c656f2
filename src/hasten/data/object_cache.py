"""A cache of samples as live objects: a read copies the object, which is faster than the store's unpickling."""

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

_MOST, _SHARE = 512 << 20, 8  # limits of all samples together: bytes, and 1/8 of the free memory
_BESIDE = 2000  # measured bytes of a sample's Python objects, its file's name included, apart from pixels and numbers
_TRIES = 16  # samples refused in a row, after which no more are considered
_PIXELS = {"1": 1, "L": 1, "RGB": 4, "RGBA": 4}  # modes without a palette: bytes of a pixel in memory

_alive: weakref.WeakSet[ObjectCache] = weakref.WeakSet()
# How to copy each type; objects of other types are immutable, as `_bytes_of` has checked.
_COPIES: dict[type, Callable[[Any], Any]] = {
    tuple: lambda parts: tuple(map(copy_of, parts)),
    list: lambda parts: list(map(copy_of, parts)),
    dict: lambda parts: {key: copy_of(part) for key, part in parts.items()},
}


class ObjectCache:
    """Samples from a store, kept as live objects together with the versions of their files.

    The objects are private: callers get copies. Only the training's own process fills it, because each worker would
    fill separate memory. Samples without room, and types whose copy may be incomplete, stay in the store only.
    """

    def __init__(self) -> None:
        self._entries: dict[Any, tuple[tuple[tuple[str, Any], ...], Any]] = {}
        self._pid = os.getpid()
        self._limit = 0 if _is_in_worker() else min(_MOST, memory_free() // _SHARE)
        self.bytes, self._tries = 0, _TRIES
        _alive.add(self)

    def find(self, place: Any) -> Any:
        """Return the sample kept for a place, which the caller must copy; None if there is none, or a file changed."""
        entry = self._entries.get(place)
        if entry is None:
            return None
        files, sample = entry
        for path, version in files:
            if told_by(path) != version:
                self._entries.pop(place, None)  # its bytes stay counted, as files seldom change
                return None
        hear_again(files)
        return sample

    def add(self, place: Any, files: dict[str, Any], sample: Any) -> bool:
        """Keep a freshly unpickled sample that nobody else holds; return False if it cannot be kept.

        Args:
            place: The key for `find`.
            files: Path -> version, for all files that the sample was made from.
            sample: The sample, not None.
        """
        if not self._tries or sample is None or os.getpid() != self._pid:
            return False
        size = _bytes_of(sample, set())
        if size < 0 or sum(ready.bytes for ready in _alive) + size + _BESIDE > self._limit:
            self._tries -= 1
            return False
        self.bytes, self._tries = self.bytes + size + _BESIDE, _TRIES
        self._entries[place] = tuple(files.items()), sample
        return True

    def clear(self) -> None:
        """Drop all samples."""
        self._entries, self.bytes, self._tries = {}, 0, _TRIES


def _is_in_worker() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.utils.data.get_worker_info() is not None


def copy_of(sample: Any) -> Any:
    """Return a copy of a sample that `ObjectCache.add` accepted; it shares no mutable object with the original."""
    copy = _COPIES.get(type(sample))
    return sample if copy is None else copy(sample)


def _bytes_of(part: Any, visited: set[int]) -> int:
    """Return the bytes that an unpickled sample's contents take; -1 if `copy_of` may not reproduce it.

    If two places hold the same list or array, a copy would hold two: such samples, too, are left to the store.
    """
    kind = type(part)
    if kind in ATOMS:
        return sys.getsizeof(part)
    if id(part) in visited:
        return -1
    visited.add(id(part))
    if kind in (tuple, list, dict):
        if kind is dict and not set(map(type, part)) <= ATOMS:
            return -1
        inside = [*part, *part.values()] if kind is dict else part
        sizes = [_bytes_of(inner, visited) for inner in inside]
        return -1 if -1 in sizes else sys.getsizeof(part) + sum(sizes)
    if kind.__module__ == "PIL.Image" and kind.__name__ == "Image":
        info = [*part.info, *part.info.values()]
        plain = all(type(value) in ATOMS or (type(value) is tuple and set(map(type, value)) <= ATOMS) for value in info)
        if not plain or part.mode not in _PIXELS or part.palette is not None:
            return -1
        _COPIES[kind] = kind.copy
        return int(part.width * part.height * _PIXELS[part.mode] + sum(map(sys.getsizeof, info)))
    if not is_plain_array(part):
        return -1
    if kind.__name__ == "Tensor":
        size = int(part.numel() * part.element_size())
        if part.untyped_storage().nbytes() != size:
            return -1  # gaps, or elements that share memory: a copy may have other strides
        _COPIES[kind] = kind.clone
        return size
    if kind.__name__ == "ndarray":
        _COPIES[kind] = _array_copy
        return int(part.nbytes)
    return sys.getsizeof(part)


def _array_copy(array: Any) -> Any:
    return array.copy(order="K")  # keeps the memory order, such as column-major
