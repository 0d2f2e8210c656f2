"""A disk cache of fetched bytes, in a folder of bounded size that several processes share.

Each entry is a separate file that begins with its length and checksum, written under a temporary name and then renamed.
A process killed while writing leaves a file that no reader opens, and that the next eviction removes. Disk errors only
cost time: bytes that cannot be kept are fetched again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from hasten.data.remote.options import Remote
from hasten.files import TEMPORARY, make_beside, remove_left_behind
from hasten.messages import warn

_HEAD = struct.Struct("<8sQI")  # mark, length, crc32
_MARK = b"hasten1\n"
_ENTRY = ".part"
# The full names of the cache's files, because the user's folder may hold other files with that suffix.
_ENTRIES = re.compile(r"[0-9a-f]{40}\.part")
_LOCK = ".total"  # locked to add or remove entries; holds the bytes counted for all entries, never too few
_STRIPES = 1024  # number of fetch locks, which keep processes from fetching the same bytes at the same time
_DEFAULT = 8 << 30
_MARGIN = 64 << 20  # free bytes to leave on the disk
_PAUSE = 60.0  # seconds without writing after the disk was full or failed
_POLL = 0.02  # seconds between attempts to take a lock


class RangeCache:
    """A shared dictionary from names to bytes, on disk.

    Args:
        folder: Folder of the entries; created with the first entry.
        limit: Bytes of all entries together; the least recently used are evicted first.
        private: Refuse a folder that others own or may write to; for one inside a shared temporary folder.
    """

    def __init__(self, folder: Path, limit: int, *, private: bool = False) -> None:
        self.folder = folder
        self.limit = limit
        self._private = private
        self._retry_at = 0.0  # when to try to write again
        self._has_warned = False

    def get(self, key: str) -> memoryview | None:
        """Return the bytes stored under a name; None if there are none, or they are damaged."""
        if not self.limit:
            return None
        path = self._path(key)
        try:
            if self._private:
                self._check_owner()
            content = path.read_bytes()
        except OSError:  # missing, or a failing disk: the caller fetches them
            return None
        body = memoryview(content)[_HEAD.size :]
        is_intact = len(content) >= _HEAD.size and _HEAD.unpack_from(content) == (_MARK, len(body), zlib.crc32(body))
        with contextlib.suppress(OSError):
            if is_intact:
                os.utime(path)  # mark it as used, for eviction
            else:
                path.unlink()
        return body if is_intact else None

    def put(self, key: str, data: bytes) -> bool:
        """Store bytes under a name; return False if there is no room, or the disk fails."""
        size = _HEAD.size + len(data)
        if size > self.limit or time.monotonic() < self._retry_at:
            return False
        temporary = ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._private:
                self._check_owner()
            path = self._path(key)
            with self._locked() as lock:
                if not self._count(lock, size):
                    return False
                temporary, fd = make_beside(str(path))
                file = os.fdopen(fd, "wb")
                file.truncate(size)  # full size at once: evictions count it in full, even if this process is killed
            with file:
                file.write(_HEAD.pack(_MARK, len(data), zlib.crc32(data)))
                file.write(data)
                file.flush()
                with self._locked():  # a process that counts the entries during the rename could miss both names
                    Path(temporary).replace(path)
        except OSError as error:
            if temporary:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink()
            self._stop_writing(error)
            return False
        return True

    @contextlib.contextmanager
    def alone(self, key: str, patience: float) -> Iterator[None]:
        """Wait while another process or thread fetches the bytes of this name, for at most `patience` seconds."""
        fd = -1
        try:
            if self.limit:
                with contextlib.suppress(OSError):
                    self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                    stripe = int(self._name(key)[:4], 16) % _STRIPES
                    fd = os.open(self.folder / f".fetching-{stripe}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                    _lock_within(fd, patience)
            yield
        finally:
            if fd >= 0:
                os.close(fd)

    def _name(self, key: str) -> str:
        return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()

    def _path(self, key: str) -> Path:
        return self.folder / (self._name(key) + _ENTRY)

    def _check_owner(self) -> None:
        """Raise PermissionError if another user could write bytes into the folder, which would be trained on."""
        status = self.folder.lstat()
        if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "it is not this user's own, or others may write to it")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the folder's lock; yield the descriptor of the file with the total."""
        fd = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd
        finally:
            os.close(fd)

    def _count(self, lock: int, size: int) -> bool:
        """Make room for `size` bytes and add them to the total; return False if evicting all entries is not enough.

        Files that other processes are writing cannot be evicted.

        Raises:
            OSError: The disk is full.
        """
        text = os.pread(lock, 32, 0)
        total = int(text) if text.strip().isdigit() else None
        if total is None or total + size > self.limit:
            total = self._evict(self.limit - size)
        if total + size > self.limit:
            return False
        if shutil.disk_usage(self.folder).free < size + _MARGIN:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.pwrite(lock, f"{total + size:<31}\n".encode(), 0)
        return True

    def _evict(self, most: int) -> int:
        """Remove the least recently used entries, to 10 % below `most`; return the exact bytes of the rest."""
        entries, total = [], 0
        with os.scandir(self.folder) as scanned:
            for entry in scanned:
                with contextlib.suppress(FileNotFoundError):
                    entry_of_ours, temporary = _ENTRIES.fullmatch(entry.name), TEMPORARY.fullmatch(entry.name)
                    if temporary and remove_left_behind(entry.path):
                        continue
                    if entry_of_ours or temporary:
                        total += entry.stat().st_size
                    if entry_of_ours:
                        entries.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
        if total <= most:
            return total
        for _, size, path in sorted(entries):
            if total <= most - most // 10:
                break
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()
            total -= size
        return total

    def _stop_writing(self, error: OSError) -> None:
        """Stop writing to the disk for a while, and warn once."""
        self._retry_at = time.monotonic() + _PAUSE
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"fetched bytes are not kept in {self.folder}: {error.strerror or error}. They are fetched again when "
                "they are needed; Remote(cache_dir=, cache_size=) names another place or size",
                stacklevel=2,
            )


def cache_for(remote: Remote) -> RangeCache:
    """Return the cache with the folder and size that `remote` asks for."""
    folder = remote.folder()
    limit = remote.cache_size
    if limit is None:
        there = next((place for place in (folder, *folder.absolute().parents) if place.is_dir()), Path("/"))
        own = [path for path in folder.glob(f"*{_ENTRY}") if _ENTRIES.fullmatch(path.name)] if folder.is_dir() else []
        limit = min(_DEFAULT, (shutil.disk_usage(there).free + sum(map(_size, own))) // 4)
    return RangeCache(folder, int(limit), private=remote.cache_dir is None)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # just evicted
        return 0


def _lock_within(fd: int, patience: float) -> None:
    """Lock a file; give up after `patience` seconds, without an error: two fetches of the same bytes do no harm."""
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                return
            time.sleep(_POLL)
