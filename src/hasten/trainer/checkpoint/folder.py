"""A run's folder: lock it for one run at a time, and find its newest intact checkpoint."""

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
    """A run's lock on its folder, held until `close` or until the process ends, even if it is killed.

    Args:
        folder: The locked folder.
        fd: The lock file, open and locked.
        swept: Temporary files of a killed run that were removed.
    """

    def __init__(self, folder: Path, fd: int, swept: list[Path]) -> None:
        self.folder = folder
        self.swept = swept
        self._pid = os.getpid()  # a forked child has a copy of this object, but not the lock
        self._fd = fd
        self._open = ExitStack()
        self._open.enter_context(not_for_children(fd))

    def close(self) -> None:
        """Release the folder for other runs. May be called twice."""
        if self._pid == os.getpid() and self._fd >= 0:
            (self.folder / LOCK).unlink(missing_ok=True)  # before it is unlocked: nobody else's file can be there
            self._fd = -1
        self._open.close()

    def abandon(self) -> None:
        """Remove the lock file, from any thread; the lock itself is released when the process ends."""
        if self._pid == os.getpid() and self._fd >= 0:
            with contextlib.suppress(OSError):
                (self.folder / LOCK).unlink()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def lock_folder(folder: str | Path) -> FolderLock:
    """Lock a folder for this run, and remove files that killed runs left half-written.

    Call it in one process of a run, rank 0. Keep the result: the folder is free when it is closed.

    Raises:
        HastenError: Another run holds the lock (the message names its process, host and start), or the folder cannot be
            written to.
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
        if not _is_still_there(path, fd):  # its holder removed the file after we had opened it: ours locks nothing
            os.close(fd)
            return lock_folder(folder)
        holder_info = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "start": time.time(),
            "command": " ".join(sys.argv),
        }
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(holder_info).encode(), 0)
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
    """Return whether the path still refers to the opened file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def latest_good(folders: str | Path | Iterable[str | Path], to_resume: bool = False) -> tuple[Path | None, list[str]]:
    """Return the intact checkpoint whose training was furthest (see `CheckpointProgress`), in one or several folders.

    Args:
        folders: Where to look; a folder that does not exist has no checkpoints.
        to_resume: Skip checkpoints that hold only weights.

    Returns:
        Its path, or None if there is none; and for each checkpoint that may be later and was skipped, what is wrong
        with it.
    """
    folders = [folders] if isinstance(folders, str | Path) else folders
    candidates: list[tuple[CheckpointProgress, int, str, Path]] = []
    broken: list[tuple[int, str]] = []
    for path, written in _checkpoints(folders):
        try:
            candidates.append((read_progress(path), written, str(path), path))
        except CheckpointError as error:
            broken.append((written, error.message))
    notes = [message for _, message in sorted(broken, reverse=True)]
    chosen = None
    for progress, _, _, path in sorted(candidates, reverse=True):
        if to_resume and not progress.resumable:
            notes.append(f"{path} was passed over: it holds weights only, and no training can go on from it.")
        elif wrong := _what_is_wrong(path):
            notes.append(wrong)
        else:
            chosen = progress, path
            break
    # A flipped bit in its progress may make a newer file look earlier: check the one written last in any case, so that
    # the user hears of it.
    newest = max(candidates, key=lambda candidate: candidate[1], default=None)
    if chosen is not None and newest is not None and newest[3] != chosen[1] and newest[0] <= chosen[0]:
        notes += [wrong] if (wrong := _what_is_wrong(newest[3])) else []
    return None if chosen is None else chosen[1], notes


def latest_start(folder: Path) -> float:
    """Return when the latest run that left checkpoints in a folder began, as a Unix time; 0 if there are none."""
    begun = 0.0
    for path, _ in _checkpoints([folder]):
        with contextlib.suppress(CheckpointError):  # a damaged file, or no checkpoint, does not count
            begun = max(begun, read_progress(path).begun)
    return begun


def _what_is_wrong(path: Path) -> str:
    """Return why a checkpoint is not intact; "" if it is."""
    try:
        verify(path)
    except CheckpointError as error:
        return error.message
    return ""


def _checkpoints(folders: Iterable[str | Path]) -> Iterator[tuple[Path, int]]:
    """Yield the checkpoint files and when they were written (ns)."""
    for folder in folders:
        for path in Path(folder).glob("*.ckpt"):
            try:
                status = path.stat()
            except OSError:  # removed since the glob, or a dangling link
                continue
            if stat.S_ISREG(status.st_mode) and not path.name.startswith("."):
                yield path, status.st_mtime_ns


def _no_lock(path: Path, error: OSError) -> HastenError:
    """Return the error for a lock file that cannot be created or locked."""
    return HastenError(
        f"Cannot lock {path}: {error.strerror}.",
        "Give the run a folder of its own, on a file system with locks (default_root_dir=...).",
    )


def _holder(fd: int) -> str:
    """Describe the holder of a lock file.

    Retries for a moment: the holder writes its description only after it has taken the lock.
    """
    pause = threading.Event()
    for _ in range(20):
        try:
            info = json.loads(os.pread(fd, 1 << 16, 0))
            start = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info["start"]))
            return f"process {info['pid']} on {info['host']}, started {start} ({info['command'][:200]})"
        except (ValueError, KeyError, TypeError):
            pause.wait(0.02)
    return "a process that does not say which"
