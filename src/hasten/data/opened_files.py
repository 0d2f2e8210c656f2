"""Records, by Python's audit events, which files a sample was read from and what else making it did.

A cached sample is valid only while its files are unchanged, and only if making it had no other effect, such as writing
a file or starting a process. `opened` is the context that records both; nested contexts pass everything outwards.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hasten.data.code_references import is_of_library

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_DOINGS = (
    *("socket.", "subprocess.", "sqlite3.", "urllib.", "ftplib.", "shutil.", "ctypes.dlopen", "os.system"),
    *("mmap.", "_thread.start_new_thread"),  # writes without events; opens files whose events are another thread's
    *("os.exec", "os.posix_spawn", "os.fork", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.putenv"),
)
_NO_FILES = ("/proc/", "/sys/", "/dev/")
_FRESH = 20_000_000  # ns: a file changed more recently may change again with the same modification time

_EVERY = 0  # means all threads: no thread has this ident
_listening: dict[int, OpenedFiles] = {}  # thread ident -> the record of its events
_hooked = False
_mapped: set[tuple[int, ...]] | None = None  # files mapped writable; None: not known yet


class OpenedFiles:
    """A record of the files opened while something was made.

    Attributes:
        files: Path -> the file's version (see `told_by`).
        doing: The first other effect, which using a cached sample would not repeat: "writes x.txt"; "" if none.
    """

    def __init__(self) -> None:
        self.files: dict[str, Any] = {}
        self.doing = ""

    def hears(self, event: str, args: tuple[Any, ...]) -> None:
        """Record a Python audit event."""
        if event in ("open", "os.listdir", "os.scandir"):
            self._open(args[0], args[2] if event == "open" and len(args) > 2 else 0)
        elif event == "pickle.find_class" and not is_of_library(str(args[0])):
            self.doing = self.doing or f"unpickles {args[1]}, whose code is not looked at"
        elif event.startswith(_DOINGS):
            self.doing = self.doing or f"does {event}"

    def _open(self, path: Any, flags: Any) -> None:
        path = "." if path is None else path
        if not isinstance(path, str | bytes | os.PathLike):
            self.doing = self.doing or "opens a file by its number"
            return
        name = os.fsdecode(path)  # not resolved: a link, or the working folder, may change later
        whole = os.path.abspath(name)  # noqa: PTH100 - must not resolve links
        if isinstance(flags, int) and flags & _WRITING:
            self.doing = self.doing or f"writes {whole.rpartition(os.sep)[2]}"
        elif whole.startswith(_NO_FILES):
            self.doing = self.doing or f"reads {whole}"
        else:
            self.files.setdefault(name, told_by(name))

    def settled(self) -> bool:
        """Return whether all files were last changed long enough ago that another change would be noticed."""
        now = time.time_ns()
        times = [max(version[0], version[1]) for version in self.files.values() if version is not None]
        return not mapped_file(self.files) and all(now - time > _FRESH for time in times)


def told_by(path: str) -> tuple[int, ...] | None:
    """Return a file's version without reading it: times, size, inode and device; None if it does not exist."""
    try:
        status = os.stat(path)  # noqa: PTH116 - faster than Path.stat, and called for each sample
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev


def changed_file(files: dict[str, Any]) -> str:
    """Return the first of these files whose version has changed, or ""."""
    return next((path for path, version in files.items() if told_by(path) != version), "")


def mapped_file(files: dict[str, Any]) -> str:
    """Return the first of these files that this process has mapped writable, or "".

    Writes through a mapping (`np.memmap(mode="r+")`) change the file's time only when a page is first written.
    """
    global _mapped
    if _mapped is None:
        _mapped = _written_by_mapping()
    return (
        next((path for path, version in files.items() if version is not None and version[3:] in _mapped), "")
        if _mapped
        else ""
    )


def _written_by_mapping() -> set[tuple[int, ...]]:
    """Return inode and device of each file that is mapped shared and writable (Linux only)."""
    try:
        with opened(aside=True):  # this may run while a sample is being made, which does not depend on this file
            lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return set()
    # A line: "7f1c-7f1d rw-s 00000000 fd:01 1311 /data/labels.bin". Skip /dev/, where workers' batches are (/dev/shm).
    fields = (line.split(maxsplit=5) for line in lines if " rw-s " in line)
    paths = {field[5] for field in fields if len(field) > 5 and not field[5].startswith(("/dev/", "/memfd:"))}
    return {version[3:] for version in map(told_by, paths) if version is not None}


def hear_again(files: Iterable[tuple[str, Any]]) -> None:
    """Report the files of a cached result to the current record, as if they were opened now.

    Args:
        files: Path and version of each file.
    """
    if _listening and (record := _listens()):
        for path, version in files:
            record.files.setdefault(path, version)


def _listens() -> OpenedFiles | None:
    return _listening.get(threading.get_ident()) or _listening.get(_EVERY)


@contextmanager
def opened(everywhere: bool = False, aside: bool = False) -> Iterator[OpenedFiles]:
    """Record what is opened inside this context, and then pass it on to the enclosing context.

    Args:
        everywhere: Record all threads, for a process that does nothing else; else only this thread.
        aside: Don't pass it on: hasten reads these files for itself.
    """
    global _hooked
    if not _hooked:
        sys.addaudithook(_on_audit_event)
        _hooked = True
    thread = _EVERY if everywhere else threading.get_ident()
    before, record = _listening.get(thread), OpenedFiles()
    _listening[thread] = record
    try:
        yield record
    finally:
        if before is None:
            del _listening[thread]
        else:
            _listening[thread] = before
    if not aside and _listening and (outer := _listens()):
        outer.doing = outer.doing or record.doing
        hear_again(record.files.items())


def _on_audit_event(event: str, args: tuple[Any, ...]) -> None:
    global _mapped
    if event == "mmap.__new__":
        _mapped = None  # look for mapped files again
    if _listening and (record := _listens()) is not None:
        record.hears(event, args)
