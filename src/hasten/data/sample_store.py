"""A cache of samples that a process and its forked workers share.

Samples are pickled into one memory-mapped file: in /dev/shm if there is room, else in the temporary folder (where the
kernel may write it to disk under memory pressure). A hash table at the file's start finds an entry by a digest of its
key. The table entry is written last, and entries have a checksum, so a reader never gets a partial sample.
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
_TABLE = 64  # offset of the table; before it: the offset of the next free byte (8 bytes), spoilt (1), paused (1)
_EMPTY = bytes(16)
_SHM = "/dev/shm"
_MARGIN = 16 << 20
_IN_NUMPY = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "bool")
_ROOMY = 1 << 30  # a smaller /dev/shm (Docker's default is 64 MiB) is left to the loaders' workers


_alive: weakref.WeakSet[SampleStore] = weakref.WeakSet()


class SampleStore:
    """A shared dictionary from hashable keys to samples, of bounded size.

    Args:
        samples: How many samples it should have room for.
        capacity: Bytes for the samples; once they are used up, `put` does nothing.
        folder: Folder of the file; by default /dev/shm if it has room, else the temporary folder. The file is unlinked
            once open, so it disappears when the processes end.

    Example:
        >>> store = SampleStore(samples=100, capacity=1 << 20)
        >>> store.put(3, {"x": [1, 2]})
        True
        >>> store.get(3)
        {'x': [1, 2]}
    """

    MISSING = object()

    def __init__(self, samples: int, capacity: int, folder: str | Path | None = None) -> None:
        self._slots = 1 << max(4, (2 * samples - 1).bit_length())  # at most half full, which keeps searches short
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
    def free_bytes(self) -> int:
        """The free bytes."""
        return self._size - int(_NEXT.unpack_from(self._map, 0)[0])

    @property
    def spoilt(self) -> bool:
        """Whether a process that shares the store has marked it as no longer usable."""
        return bool(self._map[_NEXT.size])

    @spoilt.setter
    def spoilt(self, spoilt: bool) -> None:
        self._map[_NEXT.size] = int(spoilt)

    @property
    def paused(self) -> bool:
        """Whether all processes must leave the store unused for now."""
        return bool(self._map[_NEXT.size + 1])

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._map[_NEXT.size + 1] = int(paused)

    @property
    def closed(self) -> bool:
        """Whether the store is spoilt or paused."""
        return self._map[_NEXT.size : _NEXT.size + 2] != b"\0\0"

    def get(self, key: Hashable) -> Any:
        """Return a fresh copy of a key's sample, or `SampleStore.MISSING`."""
        try:
            digest = digest_of(key)
        except Exception:  # pickling may raise anything
            return self.MISSING
        for slot in self._search(digest):
            slot_digest, offset, length, crc = _ENTRY.unpack_from(self._map, slot)
            if slot_digest == _EMPTY:
                return self.MISSING
            if slot_digest == digest:
                payload = self._map[offset : offset + length]
                return pickle.loads(payload) if zlib.crc32(payload) == crc else self.MISSING
        return self.MISSING

    def put(self, key: Hashable, sample: Any) -> bool:
        """Store a sample; return False if there is no room, or it cannot be pickled."""
        try:
            digest, payload = digest_of(key), pack(sample)
        except Exception:  # pickling may raise anything: such a sample is not stored
            return False
        with self._lock:
            # lockf, not flock: a record lock belongs to a process, while forked processes share the parent's flock. It
            # does not exclude threads, hence `_lock`.
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
            return False  # writing to a mapped file on a full disk would kill the process (SIGBUS)
        for slot in self._search(digest):
            slot_digest = _ENTRY.unpack_from(self._map, slot)[0]
            if slot_digest == digest:
                return True
            if slot_digest == _EMPTY:
                self._map[offset : offset + len(payload)] = payload
                _NEXT.pack_into(self._map, 0, offset + len(payload))
                struct.pack_into("<QII", self._map, slot + 16, offset, len(payload), zlib.crc32(payload))
                self._map[slot : slot + 16] = digest
                return True
        return False

    def _search(self, digest: bytes) -> Any:
        """Return the offsets of the table slots where a digest may be, in probing order (at most 64)."""
        first = int.from_bytes(digest[:8], "little")
        return (_TABLE + ((first + step) % self._slots) * _ENTRY.size for step in range(64))


class _Pickler(pickle.Pickler):
    """A pickler that stores plain CPU tensors as NumPy arrays, with their strides.

    Plain pickle stores a tensor by torch.save, which takes longer than most image decoders and never gives the same
    bytes twice. Strides are kept because they decide which kernels later compute on a batch.
    """

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
        # A permuted view of a dense tensor, such as an image in channels_last: store it in memory order, and the
        # permutation. Other strides (slices, expanded tensors) are stored contiguously.
        order = sorted(range(obj.dim()), key=lambda dim: -obj.stride(dim))
        dense = obj.permute(order)
        if obj.is_contiguous() or not dense.is_contiguous():
            dense, order = obj.contiguous(), []
        if not order and str(obj.dtype).removeprefix("torch.") in _IN_NUMPY:
            return torch.from_numpy, (dense.numpy(),)
        raw = dense.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (raw, obj.dtype, tuple(dense.shape), order)


def _tensor(raw: Any, dtype: Any, shape: tuple[int, ...], order: list[int]) -> Any:
    """Rebuild a tensor from its bytes in memory order, then permute its dimensions back. Pickles refer to this name."""
    import torch

    dense = torch.from_numpy(raw).view(dtype).reshape(shape)
    return dense.permute([order.index(dim) for dim in range(len(order))]) if order else dense


def pack(sample: Any) -> bytes:
    """Return a sample as bytes; equal samples give equal bytes.

    Raises:
        PicklingError: The sample has parts that cannot be pickled.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(sample)
    return buffer.getvalue()


def digest_of(key: Hashable) -> bytes:
    """Return a 16-byte digest of a key and its type, which is never all zero."""
    return hashlib.blake2b(pickle.dumps(key, protocol=5), digest_size=15).digest() + b"\1"


def room() -> int:
    """Return the bytes that another store may take.

    That is the smaller of half the free memory and half the free space in /dev/shm (a quarter of the free disk, if the
    store would be in the temporary folder), after what the existing stores may still grow by.
    """
    promised = sum(store.free_bytes for store in _alive if not store.spoilt)
    shm = _shm_free()
    place = (shm - promised) // 2 if shm >= _ROOMY else (shutil.disk_usage(tempfile.gettempdir()).free - promised) // 4
    return max(0, min(place, (memory_free() - promised) // 2))


def _roomy_folder(size: int) -> str:
    """Return /dev/shm if the store fits there, else the temporary folder."""
    return _SHM if _shm_free() >= max(size, _ROOMY) else tempfile.gettempdir()


def _shm_free() -> int:
    return shutil.disk_usage(_SHM).free if Path(_SHM).is_dir() and os.access(_SHM, os.W_OK) else 0
