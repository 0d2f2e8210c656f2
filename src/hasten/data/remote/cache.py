"""Bytes that were fetched, kept in a folder of bounded size that several processes share.

Each entry is a file of its own, with its length and checksum in front, written under another name and then renamed.
Whoever is killed meanwhile leaves a file that no reader opens and the next eviction removes. Trouble with the disk
costs time only: what cannot be kept is fetched again.
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
# The cache's own files, by their whole names: a folder that a person names may hold others that end alike.
_ENTRIES = re.compile(r"[0-9a-f]{40}\.part")
_LOCK = ".total"  # locked by who adds or removes; holds the bytes that all entries take, at least
_STRIPES = 1024  # locks of those who fetch, so that processes do not fetch the same bytes at the same time
_DEFAULT = 8 << 30
_MARGIN = 64 << 20  # bytes of the disk that are left to others
_PAUSE = 60.0  # seconds without a try after the disk was full
_POLL = 0.02  # seconds between looks at a lock that another process holds


class RangeCache:
    """A shared dictionary from names to bytes, on disk.

    Args:
        folder: Where entries lie; made when the first is put.
        limit: Bytes of all entries together; what was used longest ago goes first.
        private: Refuse a folder that others own or may write to: one in a temporary folder that all share.
    """

    def __init__(self, folder: Path, limit: int, *, private: bool = False) -> None:
        self.folder = folder
        self.limit = limit
        self._private = private
        self._again = 0.0  # when to try to write again
        self._told = False

    def get(self, key: str) -> memoryview | None:
        """Return the bytes of a name; None where they are not there whole."""
        if not self.limit:
            return None
        path = self._path(key)
        try:
            if self._private:
                self._check_owner()
            content = path.read_bytes()
        except OSError:  # not there, or a disk that cannot be read: they are fetched
            return None
        body = memoryview(content)[_HEAD.size :]
        whole = len(content) >= _HEAD.size and _HEAD.unpack_from(content) == (_MARK, len(body), zlib.crc32(body))
        with contextlib.suppress(OSError):
            if whole:
                os.utime(path)  # used just now
            else:
                path.unlink()
        return body if whole else None

    def put(self, key: str, data: bytes) -> bool:
        """Keep bytes under a name; False where there is no room for them, or the disk fails."""
        size = _HEAD.size + len(data)
        if size > self.limit or time.monotonic() < self._again:
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
                file.truncate(size)  # from here on it counts in full, wherever its writer is killed
            with file:
                file.write(_HEAD.pack(_MARK, len(data), zlib.crc32(data)))
                file.write(data)
                file.flush()
                with self._locked():  # else who counts meanwhile may see it under neither name
                    Path(temporary).replace(path)
        except OSError as error:
            if temporary:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink()
            self._rest(error)
            return False
        return True

    @contextlib.contextmanager
    def alone(self, key: str, patience: float) -> Iterator[None]:
        """Wait while another process, or thread, fetches what has this name, `patience` seconds at most."""
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
        """Raise where another user could put bytes into the folder, which would then be trained on."""
        found = self.folder.lstat()
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "it is not this user's own, or others may write to it")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the folder's lock; yield the descriptor of the file that holds the count."""
        fd = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd
        finally:
            os.close(fd)

    def _count(self, lock: int, size: int) -> bool:
        """Make room for so many bytes and count them; False where what is there is being written by others."""
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
        """Remove what was used longest ago, a tenth more than is needed; return what the rest takes, exactly."""
        entries, total = [], 0
        with os.scandir(self.folder) as found:
            for entry in found:
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

    def _rest(self, error: OSError) -> None:
        """Do without the disk for a while; say so once."""
        self._again = time.monotonic() + _PAUSE
        if not self._told:
            self._told = True
            warn(
                f"fetched bytes are not kept in {self.folder}: {error.strerror or error}. They are fetched again when "
                "they are needed; Remote(cache_dir=, cache_size=) names another place or size",
                stacklevel=2,
            )


def cache_for(remote: Remote) -> RangeCache:
    """Return the cache that is asked for."""
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
    except OSError:  # evicted meanwhile
        return 0


def _lock_within(fd: int, patience: float) -> None:
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                return
            time.sleep(_POLL)
