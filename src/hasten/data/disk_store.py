"""A cache of samples on disk, for processes that share no memory, and for the next run.

A file holds the samples of one state of a dataset, under a name that stands for that state. It is read and written by
`pread` and `pwrite`: a full or failing disk is an error that can be caught, where a mapping would end the process by
SIGBUS. An entry is found only after its bytes are written, and carries their checksum, so whoever is killed leaves it
whole or not there.
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

_ENTRY = struct.Struct("<16sQII")  # key hash, offset, length, crc32: as in memory
_TABLE, _PROBES = 64, 64
_EMPTY = bytes(16)
_PAUSE = 60.0  # seconds without a try after the disk was full


class DiskStore:
    """A shared dictionary from hashable keys to samples, in a file of a bounded folder.

    Args:
        samples: How many samples a file should have room for.
        folder: Where the files lie.

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
        self._slots = 1 << max(4, (4 * samples - 1).bit_length())  # at most a quarter full: datasets may share a file
        self._paused = mmap.mmap(-1, 1)  # shared with forked workers, not with other trainings
        self._file: _File | None = None
        self._again, self._told = 0.0, False

    def open(self, name: str) -> None:
        """Use the file of this name from here on, made if it is missing or damaged.

        Raises:
            OSError: It cannot be.
        """
        path = self.folder.path / f"{name}-{self._slots:x}{SUFFIX}"
        with self.folder.locked():
            file = None
            with contextlib.suppress(FileNotFoundError):
                file = _File(path, os.O_RDWR | os.O_NOFOLLOW)
            if file is None or not self._is_whole(file.fd):
                file = self._make(path)
            # Held as long as this process or one forked from it has the file open: then nobody removes it.
            fcntl.flock(file.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.utime(file.fd)
        self._file = file  # the former one is closed when no thread reads it any more

    def _is_whole(self, fd: int) -> bool:
        head, found = os.pread(fd, HEAD.size, 0), os.fstat(fd)
        if len(head) < HEAD.size or found.st_size < self._data or found.st_uid != os.geteuid():
            return False  # another user's: what he writes into it would be unpickled
        mark, slots, after, granted, spoilt = HEAD.unpack(head)
        return bool(mark == MARK and slots == self._slots and not spoilt and self._data <= after <= granted)

    def _make(self, path: Path) -> _File:
        """Make an empty file; the folder's lock is held, so a file under the other name is of one who was killed."""
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
        """Whether a process, of this training or another, found that the open file must not be used any more."""
        file = self._file
        try:
            return file is None or os.pread(file.fd, 1, SPOILT_AT) != b"\0"
        except OSError:  # a disk that fails
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
        """Whether neither this process nor those forked from it shall use it for now."""
        return self._paused[0] != 0

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._paused[0] = int(paused)

    @property
    def closed(self) -> bool:
        """Whether it is paused or spoilt."""
        return self.paused or self.spoilt

    def get(self, key: Hashable) -> Any:
        """The sample of a key, as a fresh copy; `SampleStore.MISSING` where it is not there whole."""
        try:
            digest = digest_of(key)
        except Exception:  # whatever a key's pickling raises
            return SampleStore.MISSING
        with contextlib.suppress(OSError):  # a disk that fails: samples are made
            if (file := self._file) is None:
                return SampleStore.MISSING
            _, entry = self._find(file.fd, digest)
            payload = None if entry is None else self._payload(file.fd, entry)
            return SampleStore.MISSING if payload is None else _unpacked(payload)
        return SampleStore.MISSING

    def put(self, key: Hashable, sample: Any) -> bool:
        """Keep a sample; False when there is no room, or when it cannot be pickled."""
        entry = self.packed(key, sample)
        return entry is not None and self.add(*entry)

    def packed(self, key: Hashable, sample: Any) -> tuple[bytes, bytes] | None:
        """Return what `add` takes; None where key or sample cannot be pickled."""
        try:
            return digest_of(key), pack(sample)
        except Exception:  # whatever a sample's pickling raises: it is then one that is not kept
            return None

    def add(self, digest: bytes, payload: bytes) -> bool:
        """Keep a packed sample, in the place of a damaged or an older one of its key; False when there is no room."""
        file = self._file
        if file is None or time.monotonic() < self._again:
            return False
        try:
            with self.folder.locked():
                return self._add(file.fd, digest, payload)
        except OSError as error:
            self._rest(error)
            return False

    def _add(self, fd: int, digest: bytes, payload: bytes) -> bool:
        slot, entry = self._find(fd, digest)
        if slot < 0:
            return False
        if entry is not None and self._payload(fd, entry) == payload:
            return True
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
        """Return the place of a key in the table (-1: there is none left), and its offset, length and checksum."""
        first = int.from_bytes(digest[:8], "little") % self._slots
        count = min(_PROBES, self._slots)
        until_end = min(count, self._slots - first)
        rows = os.pread(fd, until_end * _ENTRY.size, _TABLE + first * _ENTRY.size)
        rows = rows.ljust(until_end * _ENTRY.size, b"\0")
        if count > until_end:
            rows += os.pread(fd, (count - until_end) * _ENTRY.size, _TABLE)
        for step, (found, *rest) in enumerate(_ENTRY.iter_unpack(rows)):
            if found in (digest, _EMPTY):
                slot = _TABLE + (first + step) % self._slots * _ENTRY.size
                return slot, (tuple(rest) if found == digest else None)
        return -1, None

    def _payload(self, fd: int, entry: tuple[int, int, int]) -> bytes | None:
        offset, length, crc = entry
        if not self._data <= offset <= os.fstat(fd).st_size - length:
            return None  # damaged: its length may ask for all memory there is
        payload = os.pread(fd, length, offset)
        return payload if len(payload) == length and zlib.crc32(payload) == crc else None

    def _rest(self, error: OSError) -> None:
        """Do without the disk for a while; say so once."""
        self._again = time.monotonic() + _PAUSE
        if not self._told:
            self._told = True
            messages.tell(
                f"hasten: sample_cache: no more samples can be kept in {self.folder.path} "
                f"({error.strerror or error}): those that are not there yet are made each time"
            )

    def __reduce__(self) -> Any:
        return DiskStore, (self.samples, self.folder)


def _unpacked(payload: bytes) -> Any:
    try:
        return pickle.loads(payload)
    except Exception:  # a class of another process's that is not to be found here: the sample is made
        return SampleStore.MISSING


class _File:
    """An open file, closed when nobody refers to it: a thread may read it while another opens the next."""

    def __init__(self, path: Path, flags: int) -> None:
        self.path = path
        self.fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self.fd)


def _write(fd: int, content: bytes, offset: int) -> None:
    """Write all of it: a disk that fills up may take a part first."""
    done = 0
    while done < len(content):
        done += os.pwrite(fd, memoryview(content)[done:], offset + done)
