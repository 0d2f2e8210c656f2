"""Write files atomically: beside their place, synced and read back, then renamed into it.

A reader sees the old file or the new one, never a part. A writer that is killed leaves a temporary file, which it held
a lock on; `remove_leftovers` removes those whose lock is free.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from hasten.errors import HastenError
from hasten.files import TEMPORARY, make_beside, remove_left_behind, sync_folder

_CAUSES = {
    errno.EROFS: ("the file system is read-only", "Mount it writable, or save to another folder."),
    errno.EACCES: ("this user may not write there", "Change the folder's permissions, or save to another folder."),
    errno.EPERM: ("this user may not write there", "Change the folder's permissions, or save to another folder."),
    errno.ENOTDIR: ("a part of the path is a file", "Save to another folder."),
    errno.EEXIST: ("there is a file where the folder should be", "Save to another folder."),
    errno.EISDIR: ("there is a folder of that name", "Remove the folder, or save under another name."),
    errno.ENAMETOOLONG: ("the name is too long", "Save under a shorter name."),
    errno.EFBIG: ("the file is larger than is allowed here", "Raise `ulimit -f`, or save to another file system."),
    errno.EIO: ("the disk reports a read or write error", "Check the disk (`dmesg`), and save to another one."),
}
_FULL = (errno.ENOSPC, errno.EDQUOT)


def check_writable(folder: str | Path, needed: int = 0) -> None:
    """Check, before a training begins, that checkpoints can be written to a folder; creates the folder.

    Args:
        folder: The folder for checkpoints.
        needed: Bytes of one checkpoint, if known.

    Raises:
        HastenError: They cannot: the folder is read-only, not permitted, a file, or has less than `needed` bytes free.
    """
    whole_file(Path(folder) / "checkpoint", lambda file: file.write(b"hasten"), lambda _: None, needed, keep=False)


def remove_leftovers(folder: str | Path) -> list[Path]:
    """Remove temporary files that killed writers left.

    A writer holds a lock on its file as long as it lives, so files that any process is writing now are kept.

    Returns:
        The files removed.
    """
    temporary = [path for path in sorted(Path(folder).glob(".hasten-*.tmp")) if TEMPORARY.fullmatch(path.name)]
    return [path for path in temporary if remove_left_behind(path)]


def whole_file(
    path: Path, write: Callable[[BinaryIO], object], check: Callable[[Path], None], needed: int, keep: bool = True
) -> None:
    """Write a file so that `path` holds either its previous content or the complete, verified new file.

    Args:
        path: The file; its folder is created.
        write: Called with the open file to write it.
        check: Reads the file back, and raises HastenError if it differs from what was written.
        needed: Approximate size in bytes, to fail before anything is written.
        keep: Put the file in its place; otherwise this is a rehearsal, and the file is removed.

    Raises:
        HastenError: The file could not be written or did not read back; `path` is unchanged.
    """
    folder = path.parent
    temporary: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usage = shutil.disk_usage(folder)
        if usage.total and usage.free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if keep and path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        name, fd = make_beside(path)
        temporary = Path(name)
        with not_for_children(fd):
            watched = _Watched(fd)
            try:
                write(cast(BinaryIO, watched))  # it has the methods that writers use
            except RuntimeError:
                if watched.failure is None:
                    raise
                raise watched.failure from None  # torch.save replaces the OSError by a RuntimeError
            os.fsync(fd)
            # Drop it from the page cache, so that reading it back reads the disk.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            _check_back(path, temporary, check)
            if keep:
                temporary.rename(path)
                temporary = None
                sync_folder(folder)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)  # first, so that the message counts its bytes as free
            temporary = None
        raise _cause(error, path if keep else folder, needed) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


@contextmanager
def not_for_children(fd: int) -> Iterator[None]:
    """Close a file at the end of the block, and at once in a forked child.

    A child that inherited it would keep its lock and its disk space.
    """
    _not_for_children.add(fd)
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == pid:
            _not_for_children.discard(fd)
            os.close(fd)


_not_for_children: set[int] = set()


def _close_in_child() -> None:
    """Close the inherited files in a forked child."""
    for fd in _not_for_children:
        os.close(fd)
    _not_for_children.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _check_back(path: Path, temporary: Path, check: Callable[[Path], None]) -> None:
    """Read a written file back, and raise if it differs."""
    try:
        check(temporary)
    except HastenError as error:
        raise HastenError(
            f"{path} was not replaced: what was written for it does not read back as it was ({error.message}).",
            "Check the disk and the memory of this machine, and save to another disk.",
        ) from error


class _Watched:
    """A file for writers that writes all bytes it gets and remembers the error that stopped it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.failure: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else view
        try:
            done = 0
            while done < len(view):
                done += os.write(self._fd, view[done : done + (1 << 30)])
        except OSError as error:
            self.failure = self.failure or error
            raise
        return len(view)

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""

    def seek(self, offset: int, whence: int = 0) -> int:
        return os.lseek(self._fd, offset, whence)

    def tell(self) -> int:
        return os.lseek(self._fd, 0, os.SEEK_CUR)


def _cause(error: OSError, path: Path, needed: int) -> HastenError:
    """Return the error for a failed write, with its cause and what to do."""
    if error.errno in _FULL:
        try:
            free = f"{shutil.disk_usage(path.parent).free:,} are free"
        except OSError:
            free = "how many are free cannot be read"
        why = "the disk is full" if error.errno == errno.ENOSPC else "the disk quota is used up"
        return HastenError(
            f"Cannot write {path}: {why}: {needed:,} bytes are needed, {free} in {path.parent}. "
            "What was there is kept.",
            "Free space there (old checkpoints?), keep fewer checkpoints, or save to another disk.",
        )
    default = (error.strerror or str(error), "Save to another folder.")
    why, fix = _CAUSES.get(error.errno or 0, default)
    return HastenError(f"Cannot write {path}: {why} ({type(error).__name__}).", fix)
