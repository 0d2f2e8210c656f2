"""Fingerprint datasets, to find ranks with different data, as after an unseeded random split."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

_LOOKED_AT = 64  # indices sampled of a long list or array: this many at least, at most 127
_DEPTH = 4


def fingerprint(dataset: Any) -> int:
    """Return a 40-bit hash of a dataset: lengths and some elements of its lists, arrays and tensors.

    Equal datasets have equal hashes; two orders of one long list almost surely have different ones. Returns 0 for an
    IterableDataset. Call it before samples are read: a dataset may cache what it has read.
    """
    if isinstance(dataset, IterableDataset):
        return 0
    crc, turned = 0, 1
    for text in _described(dataset, 0):
        crc, turned = zlib.crc32(text, crc), zlib.crc32(text[::-1], turned)
    return crc & 0xFFFFF | (turned & 0xFFFFF) << 20


def _described(data: Any, depth: int) -> Iterator[bytes]:
    """Yield byte strings that describe a value, down to `_DEPTH` levels of lists and datasets."""
    yield type(data).__name__.encode()
    if isinstance(data, str | PurePath):  # the last two parts only: another machine may mount the files elsewhere
        yield "/".join(str(data).split("/")[-2:]).encode(errors="replace")
    elif isinstance(data, int | float | bytes):
        yield repr(data).encode()
    elif _is_array(data):
        yield from _elements(data, depth)
    elif depth < _DEPTH and isinstance(data, list | tuple | range):
        yield str(len(data)).encode()
        for index in _places(len(data)):
            yield from _described(data[index], depth + 1)
    elif depth < _DEPTH and (not depth or isinstance(data, Dataset)):
        for name, value in sorted(getattr(data, "__dict__", {}).items()):
            if _is_array(value) or isinstance(value, list | tuple | range | Dataset):
                yield name.encode()
                yield from _described(value, depth + 1)


def _is_array(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return isinstance(value, torch.Tensor) or (
        numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)  # includes np.memmap
    )


def _elements(array: Any, depth: int) -> Iterator[bytes]:
    """Yield byte strings that describe an array: shape, dtype, and three elements of some rows."""
    yield f"{tuple(array.shape)} {array.dtype}".encode()
    if isinstance(array, torch.Tensor) and (array.layout is not torch.strided or array.device.type == "meta"):
        return
    if not array.ndim:
        yield repr(array.item()).encode()
        return
    for index in _places(array.shape[0]):
        row = array[index]
        if not _is_array(row):  # an element of an array of objects
            yield from _described(row, depth + 1)
            continue
        flat = row.reshape(-1)
        yield repr([flat[place].item() for place in (0, len(flat) // 2, -1)] if len(flat) else []).encode()


def _places(length: int) -> range:
    """Return at most 127 indices, spread over the whole length."""
    return range(0, length, max(1, length // _LOOKED_AT))
