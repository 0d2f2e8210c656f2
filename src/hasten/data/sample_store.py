"""A cache of samples that a process and its forked workers share.

Samples are pickled into one memory-mapped file: in /dev/shm where there is room, else in the temporary folder
(where the kernel may write it to disk under memory pressure). Entries are found by a hash of their key, are
published only once they are whole, and carry a checksum, so a reader never gets half a sample.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import mmap
import os
import pickle
import shutil
import struct
import tempfile
import threading
import weakref
import zlib
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from hasten.evidence.machine import memory_free

_ENTRY = struct.Struct("<16sQII")  # key hash, offset, length, crc32
_NEXT = struct.Struct("<Q")
_TABLE = 64  # the table begins here; before it stands the offset of the next free byte
_EMPTY = bytes(16)
_SHM = "/dev/shm"
_MARGIN = 16 << 20
_IN_NUMPY = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "bool")
_ROOMY = 1 << 30  # a smaller /dev/shm (Docker gives 64 MiB) is left to the loaders' workers


_alive: weakref.WeakSet[SampleStore] = weakref.WeakSet()


class SampleStore:
    """A shared dictionary from hashable keys to samples, of bounded size.

    Args:
        samples: How many samples it should have room for.
        capacity: Bytes for the samples; when they are used up, `put` does nothing.
        folder: Where the file lies; by default /dev/shm if it has the room, else the temporary folder. The file has
            no name once it is open, so it goes when the processes do.

    Example:
        >>> store = SampleStore(samples=100, capacity=1 << 20)
        >>> store.put(3, {"x": [1, 2]})
        True
        >>> store.get(3)
        {'x': [1, 2]}
    """

    MISSING = object()

    def __init__(self, samples: int, capacity: int, folder: str | Path | None = None) -> None:
        self._slots = 1 << max(4, (2 * samples - 1).bit_length())  # at most half full: short searches
        self._data = _TABLE + self._slots * _ENTRY.size
        self._size = self._data + capacity
        self._lock = threading.Lock()
        with tempfile.TemporaryFile(dir=folder or _roomy_folder(self._size), prefix="hasten-cache-") as file:
            file.truncate(self._size)
            self._fd = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._fd)
        self._map = mmap.mmap(self._fd, self._size)
        _NEXT.pack_into(self._map, 0, self._data)
        _alive.add(self)

    @property
    def left(self) -> int:
        """Bytes that may still be put in."""
        return self._size - int(_NEXT.unpack_from(self._map, 0)[0])

    @property
    def spoilt(self) -> bool:
        """Whether a process that shares it said that it must not be used any more."""
        return bool(self._map[_NEXT.size])

    @spoilt.setter
    def spoilt(self, spoilt: bool) -> None:
        self._map[_NEXT.size] = int(spoilt)

    @property
    def paused(self) -> bool:
        """Whether no process shall use it for now."""
        return bool(self._map[_NEXT.size + 1])

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._map[_NEXT.size + 1] = int(paused)

    @property
    def closed(self) -> bool:
        """Whether it is spoilt or paused."""
        return self._map[_NEXT.size : _NEXT.size + 2] != b"\0\0"

    def get(self, key: Hashable) -> Any:
        """The sample of a key, as a fresh copy; `SampleStore.MISSING` when it is not there."""
        try:
            digest = digest_of(key)
        except Exception:  # whatever a key's pickling raises
            return self.MISSING
        for slot in self._search(digest):
            found, offset, length, crc = _ENTRY.unpack_from(self._map, slot)
            if found == _EMPTY:
                return self.MISSING
            if found == digest:
                payload = self._map[offset : offset + length]
                return pickle.loads(payload) if zlib.crc32(payload) == crc else self.MISSING
        return self.MISSING

    def put(self, key: Hashable, sample: Any) -> bool:
        """Keep a sample; False when there is no room, or when it cannot be pickled."""
        try:
            digest, payload = digest_of(key), pack(sample)
        except Exception:  # whatever a sample's pickling raises: it is then one that is not kept
            return False
        with self._lock:
            # A record lock is per process: it also excludes processes forked after the file was opened.
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                return self._add(digest, payload)
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _add(self, digest: bytes, payload: bytes) -> bool:
        (offset,) = _NEXT.unpack_from(self._map, 0)
        if offset + len(payload) > self._size:
            return False
        disk = os.fstatvfs(self._fd)
        if disk.f_bavail * disk.f_frsize < len(payload) + _MARGIN:
            return False  # to write to a mapped file on a full disk kills the process
        for slot in self._search(digest):
            found = _ENTRY.unpack_from(self._map, slot)[0]
            if found == digest:
                return True
            if found == _EMPTY:
                self._map[offset : offset + len(payload)] = payload
                _NEXT.pack_into(self._map, 0, offset + len(payload))
                struct.pack_into("<QII", self._map, slot + 16, offset, len(payload), zlib.crc32(payload))
                self._map[slot : slot + 16] = digest
                return True
        return False

    def _search(self, digest: bytes) -> Any:
        """Places in the table where a key may stand, in order (at most 64)."""
        first = int.from_bytes(digest[:8], "little")
        return (_TABLE + ((first + step) % self._slots) * _ENTRY.size for step in range(64))


class _Pickler(pickle.Pickler):
    """Plain pickle stores a tensor by torch.save, which takes longer than most decoders and never gives the same
    bytes twice; arrays are fast. Strides are kept: they decide which kernels compute on a batch."""

    def reducer_override(self, obj: Any) -> Any:
        import torch

        if (
            type(obj) is not torch.Tensor
            or obj.device.type != "cpu"
            or obj.requires_grad
            or obj.layout is not torch.strided
            or obj.is_quantized
        ):
            return NotImplemented
        obj = obj.resolve_conj().resolve_neg()
        order = sorted(range(obj.dim()), key=lambda dim: -obj.stride(dim))
        lying = obj.permute(order)
        if obj.is_contiguous() or not lying.is_contiguous():
            lying, order = obj.contiguous(), []
        if not order and str(obj.dtype).removeprefix("torch.") in _IN_NUMPY:
            return torch.from_numpy, (lying.numpy(),)
        raw = lying.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (raw, obj.dtype, tuple(lying.shape), order)


def _tensor(raw: Any, dtype: Any, shape: tuple[int, ...], order: list[int]) -> Any:
    """A tensor from its bytes: as it lay in memory, its dimensions then put back into their order."""
    import torch

    lying = torch.from_numpy(raw).view(dtype).reshape(shape)
    return lying.permute([order.index(dim) for dim in range(len(order))]) if order else lying


def pack(sample: Any) -> bytes:
    """A sample as bytes; equal samples give equal bytes.

    Raises:
        PicklingError: The sample has parts that cannot be pickled.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(sample)
    return buffer.getvalue()


def digest_of(key: Hashable) -> bytes:
    """Return 16 bytes that stand for a key, its type included; never all zero."""
    return hashlib.blake2b(pickle.dumps(key, protocol=5), digest_size=15).digest() + b"\1"


def room() -> int:
    """Bytes that a further store may take: half of what is free where it would lie (a quarter of a temporary folder on
    disk) and half of the free memory, less what the stores there are may still grow by."""
    promised = sum(store.left for store in _alive if not store.spoilt)
    shm = _shm_free()
    place = (shm - promised) // 2 if shm >= _ROOMY else (shutil.disk_usage(tempfile.gettempdir()).free - promised) // 4
    return max(0, min(place, (memory_free() - promised) // 2))


def _roomy_folder(size: int) -> str:
    """/dev/shm when the store fits there, else the temporary folder."""
    return _SHM if _shm_free() >= max(size, _ROOMY) else tempfile.gettempdir()


def _shm_free() -> int:
    return shutil.disk_usage(_SHM).free if Path(_SHM).is_dir() and os.access(_SHM, os.W_OK) else 0
