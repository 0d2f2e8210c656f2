"""The folder of cached samples on a disk: chooses the disk, limits the bytes, and evicts files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hasten.errors import HastenError
from hasten.evidence.disks import filesystem, is_network

HEAD = struct.Struct("<8sQQQB")  # mark, slots of the table, next free byte, bytes granted, spoilt
MARK = b"hasten1s"
NEXT_AT, GRANTED_AT, SPOILT_AT = 16, 24, 32
SUFFIX = ".samples"
_LOCK = ".hasten-samples-lock"
_SAMPLE_FILE = re.compile(r"[0-9a-f]{40}-[0-9a-f]+\.samples")  # the user's folder may hold other files
_CHUNK = 16 << 20  # bytes granted to a file at a time
_MARGIN = 256 << 20  # free bytes to leave on the disk
_SHARE = 4  # the default limit is 1/4 of the free space
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}

_locked: set[int] = set()  # file descriptors that threads hold locked now
_hooked = False


class SampleFolder:
    """A folder of bounded size in which several processes keep samples, with a file for each state of a dataset.

    Args:
        folder: The folder; created if missing. None: a folder of this user on the fastest local disk.
        limit: Bytes of all files together. None: a quarter of the free space, counting the existing files as free.

    Raises:
        HastenError: There is no suitable disk, or the folder belongs to another user or is not writable.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, limit: int | None = None) -> None:
        self.path = Path(folder).expanduser().absolute() if folder is not None else _own_folder()
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._check_owner()
            with self.locked():
                pass
        except OSError as error:
            raise HastenError(
                f"samples cannot be kept in {self.path}: {error.strerror or error}", "name another cache_dir"
            ) from None
        if limit is None:
            limit = (shutil.disk_usage(self.path).free + self.granted_bytes()) // _SHARE
        self.limit = limit

    def _check_owner(self) -> None:
        """Raise PermissionError if another user could write samples into the folder, which would be unpickled here."""
        status = self.path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(errno.EPERM, "it is not this user's own, or others may write to it")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock against other processes and threads; the kernel releases a killed process's lock."""
        global _hooked
        if not _hooked:
            # If another thread forks while the lock is held, the child inherits the descriptor and with it the lock,
            # and would keep it: close it there.
            os.register_at_fork(after_in_child=_forget_locks)
            _hooked = True
        fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _locked.add(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            _locked.discard(fd)
            os.close(fd)

    def granted_bytes(self) -> int:
        """Return the bytes granted to all files."""
        return sum(granted for _, granted, _ in self._files())

    def grant(self, fd: int, end: int) -> bool:
        """Let a file grow to `end` bytes, evicting unused files if needed; return False if the limit forbids it.

        The caller holds the lock.

        Raises:
            OSError: The disk is full.
        """
        (granted,) = struct.unpack("<Q", os.pread(fd, 8, GRANTED_AT))
        if end <= granted:
            return True
        own_inode = os.fstat(fd).st_ino
        other_bytes = sum(size for path, size, inode in self._files() if inode != own_inode)
        new_grant = min(max(end, granted + _CHUNK), self.limit - other_bytes)
        if new_grant < end:
            other_bytes -= self._evict(end + other_bytes - self.limit, own_inode)
            new_grant = min(max(end, granted + _CHUNK), self.limit - other_bytes)
        if new_grant < end:
            return False
        disk = os.fstatvfs(fd)
        if disk.f_bavail * disk.f_frsize < new_grant - granted + _MARGIN:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.pwrite(fd, struct.pack("<Q", new_grant), GRANTED_AT)
        return True

    def _evict(self, bytes_over: int, own_inode: int) -> int:
        """Remove files that no process has open, least recently opened first; return the bytes they had."""
        removed = 0
        for path, size, inode in sorted(self._files(), key=lambda file: _opened_at(file[0])):
            if removed >= bytes_over:
                break
            if inode == own_inode:
                continue
            with contextlib.suppress(OSError), _descriptor(path) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if a process uses the file
                path.unlink()
                removed += size
        return removed

    def _files(self) -> list[tuple[Path, int, int]]:
        """Return path, granted bytes and inode of each file of samples."""
        files = []
        for path in self.path.glob(f"*{SUFFIX}"):
            if not _SAMPLE_FILE.fullmatch(path.name):
                continue
            with contextlib.suppress(OSError), _descriptor(path) as fd:
                head = os.pread(fd, HEAD.size, 0).ljust(HEAD.size, b"\0")
                mark, _, _, granted, _ = HEAD.unpack(head)
                if mark == MARK:
                    files.append((path, granted, os.fstat(fd).st_ino))
        return files


@contextlib.contextmanager
def _descriptor(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield fd
    finally:
        os.close(fd)


def _opened_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # somebody has just removed it by hand
        return 0


def _forget_locks() -> None:
    for fd in _locked:
        with contextlib.suppress(OSError):
            os.close(fd)  # the parent's descriptor keeps the lock
    _locked.clear()


def room_on_disk() -> int:
    """Return the default limit of the default folder (bytes); 0 if no disk has room."""
    try:
        folder = _own_folder()
    except HastenError:
        return 0
    return shutil.disk_usage(folder.parent).free // _SHARE


def _own_folder() -> Path:
    """Return this user's folder on the fastest disk: SSDs first, then unknown disks, spinning disks, network disks.

    The kernel's description decides, not a timing, which would depend on the disk's load at the moment.

    Raises:
        HastenError: No local disk has room.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    places = [os.environ.get("SLURM_TMPDIR"), os.environ.get("TMPDIR"), tempfile.gettempdir(), "/var/tmp", home]
    ranked = []
    for order, place in enumerate(dict.fromkeys(str(place) for place in places if place)):
        existing = next(path for path in (Path(place), *Path(place).absolute().parents) if path.is_dir())
        if not os.access(existing, os.W_OK):
            continue
        rank = _rank(existing)
        free = shutil.disk_usage(existing).free
        if rank is not None and free > 2 * _MARGIN:
            ranked.append((rank, order, Path(place)))
    if not ranked:
        raise HastenError(
            "no local disk has room for samples: temporary and cache folders lie in memory or are full",
            "name a cache_dir",
        )
    return min(ranked)[2] / f"hasten-samples-{os.geteuid()}"


def _rank(path: Path) -> int | None:
    """Return how fast a path's disk is (0: fastest); None for memory."""
    kind, spins = filesystem(path)
    if kind in _IN_MEMORY:
        return None
    if is_network(kind):
        return 3
    return {False: 0, None: 1, True: 2}[spins]
