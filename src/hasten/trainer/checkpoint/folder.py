"""The folder of a run: one run at a time, and its newest checkpoint that is whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from hasten.errors import HastenError
from hasten.trainer.checkpoint.errors import CheckpointError
from hasten.trainer.checkpoint.files import verify
from hasten.trainer.checkpoint.progress import CheckpointProgress, read_progress
from hasten.trainer.checkpoint.writing import check_writable, not_for_children, remove_leftovers

LOCK = ".hasten.lock"


class FolderLock:
    """A run's hold on its folder, until `close` or the end of the process, however that comes.

    Args:
        folder: The folder held.
        fd: The lock file, open and locked.
        swept: Temporary files that a killed run had left there, and that are gone now.
    """

    def __init__(self, folder: Path, fd: int, swept: list[Path]) -> None:
        self.folder = folder
        self.swept = swept
        self._pid = os.getpid()  # a forked child has a copy of this object, but not the lock
        self._fd = fd
        self._open = ExitStack()
        self._open.enter_context(not_for_children(fd))

    def close(self) -> None:
        """Lets another run have the folder. May be called twice."""
        if self._pid == os.getpid() and self._fd >= 0:
            (self.folder / LOCK).unlink(missing_ok=True)  # while it is still held: nobody else's can be there
            self._fd = -1
        self._open.close()

    def abandon(self) -> None:
        """Takes the lock file away, from any thread; the lock itself ends with the process."""
        if self._pid == os.getpid() and self._fd >= 0:
            with contextlib.suppress(OSError):
                (self.folder / LOCK).unlink()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def lock_folder(folder: str | Path) -> FolderLock:
    """Takes a folder for this run alone, and clears away what killed runs left half-written.

    Call it in one process of a run, rank 0. Keep what it returns: the folder is free when that is closed.

    Raises:
        HastenError: Another run has it (named with process, host and start), or it cannot be written to.
    """
    folder = Path(folder)
    check_writable(folder)
    path = folder / LOCK
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _no_lock(path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_still_there(path, fd):  # its holder let it go, and took it away, after we had opened it
            os.close(fd)
            return lock_folder(folder)
        me = {"pid": os.getpid(), "host": socket.gethostname(), "start": time.time(), "command": " ".join(sys.argv)}
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(me).encode(), 0)
        return FolderLock(folder, fd, remove_leftovers(folder))
    except OSError as error:
        holder = _holder(fd)
        os.close(fd)
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            raise HastenError(
                f"Another run is using {folder}: {holder}.",
                "Wait for it or stop it, or give this run another folder (default_root_dir=...).",
            ) from None
        raise _no_lock(path, error) from error


def _is_still_there(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def latest_good(folders: str | Path | Iterable[str | Path], to_resume: bool = False) -> tuple[Path | None, list[str]]:
    """The checkpoint of a folder whose training was furthest, of those that are whole; see `CheckpointProgress`.

    Args:
        folders: Where to look, one or several; one that does not exist has none.
        to_resume: Pass over those that hold weights only.

    Returns:
        Its path, None if there is none; and for each that may be later and was passed over, what is wrong with it.
    """
    folders = [folders] if isinstance(folders, str | Path) else folders
    found: list[tuple[CheckpointProgress, int, str, Path]] = []
    broken: list[tuple[int, str]] = []
    for path, written in _checkpoints(folders):
        try:
            found.append((read_progress(path), written, str(path), path))
        except CheckpointError as error:
            broken.append((written, error.message))
    notes = [message for _, message in sorted(broken, reverse=True)]
    chosen = None
    for stands, _, _, path in sorted(found, reverse=True):
        if to_resume and not stands.resumable:
            notes.append(f"{path} was passed over: it holds weights only, and no training can go on from it.")
        elif wrong := _what_is_wrong(path):
            notes.append(wrong)
        else:
            chosen = stands, path
            break
    # A flipped bit may have made a file look earlier than it is: the one written last is looked at in any case.
    newest = max(found, key=lambda one: one[1], default=None)
    if chosen is not None and newest is not None and newest[3] != chosen[1] and newest[0] <= chosen[0]:
        notes += [wrong] if (wrong := _what_is_wrong(newest[3])) else []
    return None if chosen is None else chosen[1], notes


def latest_start(folder: Path) -> float:
    """Return when the run began that was begun last, of those that left checkpoints in a folder; 0 where none did."""
    begun = 0.0
    for path, _ in _checkpoints([folder]):
        with contextlib.suppress(CheckpointError):  # damaged, or something else
            begun = max(begun, read_progress(path).begun)
    return begun


def _what_is_wrong(path: Path) -> str:
    try:
        verify(path)
    except CheckpointError as error:
        return error.message
    return ""


def _checkpoints(folders: Iterable[str | Path]) -> Iterator[tuple[Path, int]]:
    """The files and when they were written."""
    for folder in folders:
        for path in Path(folder).glob("*.ckpt"):
            try:
                about = path.stat()
            except OSError:  # removed meanwhile, or a link to nothing
                continue
            if stat.S_ISREG(about.st_mode) and not path.name.startswith("."):
                yield path, about.st_mtime_ns


def _no_lock(path: Path, error: OSError) -> HastenError:
    return HastenError(
        f"Cannot lock {path}: {error.strerror}.",
        "Give the run a folder of its own, on a file system with locks (default_root_dir=...).",
    )


def _holder(fd: int) -> str:
    """Who holds a lock file. For a moment after a run takes it, that is not written yet."""
    pause = threading.Event()
    for _ in range(20):
        try:
            about = json.loads(os.pread(fd, 1 << 16, 0))
            start = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about["start"]))
            return f"process {about['pid']} on {about['host']}, started {start} ({about['command'][:200]})"
        except (ValueError, KeyError, TypeError):
            pause.wait(0.02)
    return "a process that does not say which"
