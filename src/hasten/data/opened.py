"""Which files a sample is made of, and what else its making does that a look at objects does not show."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_DOINGS = (
    *("socket.", "subprocess.", "sqlite3.", "urllib.", "ftplib.", "shutil.", "ctypes.dlopen", "os.system"),
    *("os.exec", "os.posix_spawn", "os.fork", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.putenv"),
)
_NO_FILES = ("/proc/", "/sys/", "/dev/")
_FRESH = 20_000_000  # ns: a file changed so shortly ago may be changed again without its time showing it

_listening: Opened | None = None
_hooked = False


class Opened:
    """What was opened while something was made.

    Attributes:
        files: Path -> what tells the file's contents (see `told_by`).
        doing: What else was done that a kept sample would not do again: "writes x.txt"; "" if nothing.
    """

    def __init__(self) -> None:
        self.files: dict[str, Any] = {}
        self.doing = ""
        self.thread = threading.get_ident()

    def hears(self, event: str, args: tuple[Any, ...]) -> None:
        """Hear of an audit event of Python's."""
        if event in ("open", "os.listdir", "os.scandir"):
            self._open(args[0], args[2] if event == "open" and len(args) > 2 else 0)
        elif event.startswith(_DOINGS):
            self.doing = self.doing or f"does {event}"

    def _open(self, path: Any, flags: Any) -> None:
        path = "." if path is None else path
        if not isinstance(path, str | bytes | os.PathLike):
            self.doing = self.doing or "opens a file by its number"
            return
        name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - a link may come to lead elsewhere
        if isinstance(flags, int) and flags & _WRITING:
            self.doing = self.doing or f"writes {name.rpartition(os.sep)[2]}"
        elif name.startswith(_NO_FILES):
            self.doing = self.doing or f"reads {name}"
        else:
            self.files.setdefault(name, told_by(name))

    def settled(self) -> bool:
        """Whether all files were last changed long enough ago that another change will show."""
        now = time.time_ns()
        return all(told is None or now - max(told[0], told[1]) > _FRESH for told in self.files.values())


def told_by(path: str) -> tuple[int, ...] | None:
    """Return what tells a file's contents without reading it; None if there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - asked for each sample
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev


def unchanged(files: dict[str, Any]) -> bool:
    """Whether files are as they were."""
    return all(told_by(path) == told for path, told in files.items())


@contextmanager
def opened() -> Iterator[Opened]:
    """Listen to what is opened inside, in this thread."""
    global _listening, _hooked
    if not _hooked:
        sys.addaudithook(_heard)
        _hooked = True
    before, _listening = _listening, Opened()
    try:
        yield _listening
    finally:
        _listening = before


def _heard(event: str, args: tuple[Any, ...]) -> None:
    if _listening is not None and _listening.thread == threading.get_ident():
        _listening.hears(event, args)
