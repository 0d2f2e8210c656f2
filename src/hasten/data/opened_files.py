"""Which files a sample was read from, and what else its making did that objects do not show."""

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
    *("mmap.", "_thread.start_new_thread"),  # written without a trace; opens what this thread does not hear of
    *("os.exec", "os.posix_spawn", "os.fork", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.putenv"),
)
_NO_FILES = ("/proc/", "/sys/", "/dev/")
_FRESH = 20_000_000  # ns: a file changed so shortly ago may be changed again without its time showing it

_EVERY = 0  # no thread has this number
_listening: dict[int, Opened] = {}  # thread -> what hears of its events
_hooked = False
_mapped: set[tuple[int, ...]] | None = None  # files mapped to be written to; None: to be looked for


class Opened:
    """Files opened while something was made.

    Attributes:
        files: Path -> what tells the file's contents (see `told_by`).
        doing: What else was done that a kept sample would not do again: "writes x.txt"; "" if nothing.
    """

    def __init__(self) -> None:
        self.files: dict[str, Any] = {}
        self.doing = ""

    def hears(self, event: str, args: tuple[Any, ...]) -> None:
        """Hear of an audit event of Python's."""
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
        name = os.fsdecode(path)  # as it was named: a link, or the working folder, may come to be another
        whole = os.path.abspath(name)  # noqa: PTH100 - it resolves no links
        if isinstance(flags, int) and flags & _WRITING:
            self.doing = self.doing or f"writes {whole.rpartition(os.sep)[2]}"
        elif whole.startswith(_NO_FILES):
            self.doing = self.doing or f"reads {whole}"
        else:
            self.files.setdefault(name, told_by(name))

    def settled(self) -> bool:
        """Whether all files were last changed long enough ago that another change will show."""
        now = time.time_ns()
        times = [max(told[0], told[1]) for told in self.files.values() if told is not None]
        return not mapped_file(self.files) and all(now - time > _FRESH for time in times)


def told_by(path: str) -> tuple[int, ...] | None:
    """Return what tells a file's contents without reading it; None if there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - asked for each sample
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev


def changed_file(files: dict[str, Any]) -> str:
    """Return the first of these files that is not as it was, or ""."""
    return next((path for path, told in files.items() if told_by(path) != told), "")


def mapped_file(files: dict[str, Any]) -> str:
    """Return the first of these files that this process has mapped to write to it, or "".

    What is written through a mapping (`np.memmap(mode="r+")`) changes the file's time only as a page is first written.
    """
    global _mapped
    if _mapped is None:
        _mapped = _written_by_mapping()
    return (
        next((path for path, told in files.items() if told is not None and told[3:] in _mapped), "") if _mapped else ""
    )


def _written_by_mapping() -> set[tuple[int, ...]]:
    """Return inode and device of each file that is mapped shared and writable (Linux only)."""
    try:
        with opened(aside=True):  # it may be asked for while a larger sample is being made
            lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return set()
    # "7f1c-7f1d rw-s 00000000 fd:01 1311 /data/labels.bin"; workers' batches lie in /dev/shm.
    fields = (line.split(maxsplit=5) for line in lines if " rw-s " in line)
    paths = {field[5] for field in fields if len(field) > 5 and not field[5].startswith(("/dev/", "/memfd:"))}
    return {told[3:] for told in map(told_by, paths) if told is not None}


def hear_again(files: Iterable[tuple[str, Any]]) -> None:
    """Let who listens know of files that something kept was made of.

    Args:
        files: Path and what tells the file's contents, of each.
    """
    if _listening and (heard := _listens()):
        for path, told in files:
            heard.files.setdefault(path, told)


def _listens() -> Opened | None:
    return _listening.get(threading.get_ident()) or _listening.get(_EVERY)


@contextmanager
def opened(everywhere: bool = False, aside: bool = False) -> Iterator[Opened]:
    """Listen to what is opened inside; who listens outside of it hears the same, files and doings.

    Args:
        everywhere: In all threads, in a process that does nothing else; else in this one.
        aside: Nobody outside hears it: hasten reads for itself.
    """
    global _hooked
    if not _hooked:
        sys.addaudithook(_heard)
        _hooked = True
    thread = _EVERY if everywhere else threading.get_ident()
    before, heard = _listening.get(thread), Opened()
    _listening[thread] = heard
    try:
        yield heard
    finally:
        if before is None:
            del _listening[thread]
        else:
            _listening[thread] = before
    if not aside and _listening and (outer := _listens()):
        outer.doing = outer.doing or heard.doing
        hear_again(heard.files.items())


def _heard(event: str, args: tuple[Any, ...]) -> None:
    global _mapped
    if event == "mmap.__new__":
        _mapped = None  # looked for again
    if _listening and (heard := _listens()) is not None:
        heard.hears(event, args)
