"""A cache of samples on disk, for processes that share no memory, and for later runs.

A file holds the samples of one state of a dataset, and its name is that state's fingerprint. It is read and written by
`pread` and `pwrite`: with them a full or failing disk is an error that can be caught, whereas a mapping would end the
process by SIGBUS. The table entry is written after the sample's bytes and has their checksum, so a process that is
killed leaves an entry either complete or absent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import pickle
import struct
import time
import weakref
import zlib
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from hasten import messages
from hasten.data.disk_folder import HEAD, MARK, NEXT_AT, SPOILT_AT, SUFFIX, SampleFolder
from hasten.data.sample_store import SampleStore, digest_of, pack

_ENTRY = struct.Struct("<16sQII")  # key hash, offset, length, crc32, as in SampleStore
_TABLE, _PROBES = 64, 64
_EMPTY = bytes(16)
_PAUSE = 60.0  # seconds without writing after the disk was full or failed


class DiskStore:
    """A shared dictionary from hashable keys to samples, in a file of a bounded folder.

    Args:
        samples: How many samples a file should have room for.
        folder: The folder of the files.

    Example:
        >>> store = DiskStore(100, SampleFolder("/local/cache", limit=1 << 30))
        >>> store.open("a name for the state of the dataset")
        >>> store.put(3, {"x": [1, 2]})
        True
        >>> store.get(3)
        {'x': [1, 2]}
    """

    def __init__(self, samples: int, folder: SampleFolder) -> None:
        self.samples, self.folder = samples, folder
        self._slots = 1 << max(4, (4 * samples - 1).bit_length())  # at most 1/4 full, as datasets may share a file
        self._paused = mmap.mmap(-1, 1)  # shared with forked workers, but not with other trainings
        self._file: _File | None = None
        self._retry_at, self._has_warned = 0.0, False

    def open(self, name: str) -> None:
        """Use the file of this name from now on; create it if it is missing or damaged.

        Raises:
            OSError: The file cannot be opened or created.
        """
        path = self.folder.path / f"{name}-{self._slots:x}{SUFFIX}"
        with self.folder.locked():
            file = None
            with contextlib.suppress(FileNotFoundError):
                file = _File(path, os.O_RDWR | os.O_NOFOLLOW)
            if file is None or not self._is_whole(file.fd):
                file = self._make(path)
            # A shared lock, held as long as this process or a fork of it has the file open: `_evict` skips such files.
            fcntl.flock(file.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.utime(file.fd)
        self._file = file  # the old one closes when the last thread that reads it drops it

    def _is_whole(self, fd: int) -> bool:
        head, status = os.pread(fd, HEAD.size, 0), os.fstat(fd)
        if len(head) < HEAD.size or status.st_size < self._data or status.st_uid != os.geteuid():
            return False  # incomplete, or of another user, whose bytes must not be unpickled here
        mark, slots, after, granted, spoilt = HEAD.unpack(head)
        return bool(mark == MARK and slots == self._slots and not spoilt and self._data <= after <= granted)

    def _make(self, path: Path) -> _File:
        """Create an empty file. The caller holds the folder's lock, so a leftover file is from a killed process."""
        making = self.folder.path / ".hasten-samples-making"
        making.unlink(missing_ok=True)
        file = _File(making, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        os.ftruncate(file.fd, self._data)
        _write(file.fd, HEAD.pack(MARK, self._slots, self._data, 0, 0), 0)
        if not self.folder.grant(file.fd, self._data):
            raise OSError(errno.ENOSPC, f"the {self.folder.limit:,} bytes of its limit are in use")
        making.replace(path)
        file.path = path
        return file

    @property
    def _data(self) -> int:
        return _TABLE + self._slots * _ENTRY.size

    @property
    def spoilt(self) -> bool:
        """Whether a process, of this training or another, has marked the open file as no longer usable."""
        file = self._file
        try:
            return file is None or os.pread(file.fd, 1, SPOILT_AT) != b"\0"
        except OSError:  # a failing disk
            return True

    @spoilt.setter
    def spoilt(self, spoilt: bool) -> None:
        file = self._file
        if file is None or not spoilt:
            return
        with contextlib.suppress(OSError), self.folder.locked():
            _write(file.fd, b"\1", SPOILT_AT)
            if os.path.samestat(file.path.stat(), os.fstat(file.fd)):
                file.path.unlink()

    @property
    def paused(self) -> bool:
        """Whether this process and those forked from it must leave the store unused for now."""
        return self._paused[0] != 0

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._paused[0] = int(paused)

    @property
    def closed(self) -> bool:
        """Whether the store is paused or spoilt."""
        return self.paused or self.spoilt

    def get(self, key: Hashable) -> Any:
        """Return a fresh copy of a key's sample, or `SampleStore.MISSING` if it is not there, or damaged."""
        try:
            digest = digest_of(key)
        except Exception:  # pickling may raise anything
            return SampleStore.MISSING
        with contextlib.suppress(OSError):  # a failing disk: the sample is made instead
            if (file := self._file) is None:
                return SampleStore.MISSING
            _, entry = self._find(file.fd, digest)
            payload = None if entry is None else self._payload(file.fd, entry)
            return SampleStore.MISSING if payload is None else _unpacked(payload)
        return SampleStore.MISSING

    def put(self, key: Hashable, sample: Any) -> bool:
        """Store a sample; return False if there is no room, or it cannot be pickled."""
        entry = self.packed(key, sample)
        return entry is not None and self.add(*entry)

    def packed(self, key: Hashable, sample: Any) -> tuple[bytes, bytes] | None:
        """Return the digest and bytes for `add`; None if key or sample cannot be pickled."""
        try:
            return digest_of(key), pack(sample)
        except Exception:  # pickling may raise anything: such a sample is not stored
            return None

    def add(self, digest: bytes, payload: bytes) -> bool:
        """Store a packed sample, replacing a damaged or older one of the key; return False if there is no room."""
        file = self._file
        if file is None or time.monotonic() < self._retry_at:
            return False
        try:
            with self.folder.locked():
                return self._add(file.fd, digest, payload)
        except OSError as error:
            self._stop_writing(error)
            return False

    def _add(self, fd: int, digest: bytes, payload: bytes) -> bool:
        slot, entry = self._find(fd, digest)
        if slot < 0:
            return False
        if entry is not None and self._payload(fd, entry) == payload:
            return True
        # This order matters: a process killed between two writes leaves an entry that is not found, or is complete.
        (offset,) = struct.unpack("<Q", os.pread(fd, 8, NEXT_AT))
        end = offset + len(payload)
        if offset < self._data or not self.folder.grant(fd, end):
            return False
        _write(fd, payload, offset)
        _write(fd, struct.pack("<Q", end), NEXT_AT)
        _write(fd, struct.pack("<QII", offset, len(payload), zlib.crc32(payload)), slot + 16)
        _write(fd, digest, slot)
        return True

    def _find(self, fd: int, digest: bytes) -> tuple[int, tuple[int, int, int] | None]:
        """Return a key's slot in the table (-1: none is free), and its offset, length and checksum (None: empty)."""
        first = int.from_bytes(digest[:8], "little") % self._slots
        count = min(_PROBES, self._slots)
        until_end = min(count, self._slots - first)
        rows = os.pread(fd, until_end * _ENTRY.size, _TABLE + first * _ENTRY.size)
        rows = rows.ljust(until_end * _ENTRY.size, b"\0")
        if count > until_end:
            rows += os.pread(fd, (count - until_end) * _ENTRY.size, _TABLE)
        for step, (slot_digest, *rest) in enumerate(_ENTRY.iter_unpack(rows)):
            if slot_digest in (digest, _EMPTY):
                slot = _TABLE + (first + step) % self._slots * _ENTRY.size
                return slot, (tuple(rest) if slot_digest == digest else None)
        return -1, None

    def _payload(self, fd: int, entry: tuple[int, int, int]) -> bytes | None:
        offset, length, crc = entry
        if not self._data <= offset <= os.fstat(fd).st_size - length:
            return None  # damaged: such a length could ask for all memory
        payload = os.pread(fd, length, offset)
        return payload if len(payload) == length and zlib.crc32(payload) == crc else None

    def _stop_writing(self, error: OSError) -> None:
        """Stop writing to the disk for a while, and say so once."""
        self._retry_at = time.monotonic() + _PAUSE
        if not self._has_warned:
            self._has_warned = True
            messages.tell(
                f"hasten: sample_cache: no more samples can be kept in {self.folder.path} "
                f"({error.strerror or error}): those that are not there yet are made each time"
            )

    def __reduce__(self) -> Any:
        return DiskStore, (self.samples, self.folder)


def _unpacked(payload: bytes) -> Any:
    try:
        return pickle.loads(payload)
    except Exception:  # for example, a class that only the other process could import: make the sample instead
        return SampleStore.MISSING


class _File:
    """An open file that closes with its last reference: a thread may still read it while another opens the next."""

    def __init__(self, path: Path, flags: int) -> None:
        self.path = path
        self.fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self.fd)


def _write(fd: int, content: bytes, offset: int) -> None:
    """Write all bytes, in several writes if need be: a disk that fills up may first take a part."""
    done = 0
    while done < len(content):
        done += os.pwrite(fd, memoryview(content)[done:], offset + done)
