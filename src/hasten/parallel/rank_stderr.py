"""Show the stderr of ranks other than 0, with the rank before each line."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from types import TracebackType

_CHUNK = 65536
_LONGEST = 1 << 16  # bytes stored of a line that has no end yet


class RankStderr:
    """Named pipes, one per rank, that a thread reads."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._ranks: dict[int, int] = {}  # descriptor -> rank
        self._rests: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="hasten-rank-stderr", daemon=True)
        self._thread.start()

    def __enter__(self) -> RankStderr:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def of(self, rank: int) -> str:
        """Create the pipe of a rank's stderr. Return its path."""
        path = f"{self._folder}/stderr-{rank}"
        os.mkfifo(path, 0o600)
        # Open it for writing too. Then a rank that opens it never blocks, and it does not end when the first of several
        # writers (a rank and its DataLoader workers, say) closes it.
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        with self._lock:
            self._ranks[fd] = rank
            self._rests[fd] = b""
        return path

    def close(self) -> None:
        """Show everything written so far, then stop reading."""
        self._over.set()
        self._thread.join()

    def _read(self) -> None:
        """Show the pipes' lines until `close`, then what is left. Runs in a thread."""
        while not self._over.wait(0.02):
            self._once()
        self._once()
        for fd, rest in self._rests.items():
            if rest:
                self._show(self._ranks[fd], rest)
            os.close(fd)

    def _once(self) -> None:
        """Show the complete lines that are in the pipes; store the rest of each."""
        with self._lock:
            pipes = list(self._ranks.items())
        for fd, rank in pipes:
            while True:
                try:
                    chunk = os.read(fd, _CHUNK)
                except BlockingIOError:
                    break
                *lines, rest = (self._rests[fd] + chunk).split(b"\n")
                for line in lines:
                    self._show(rank, line)
                self._rests[fd] = rest.rpartition(b"\r")[2][-_LONGEST:]

    def _show(self, rank: int, line: bytes) -> None:
        """Write a line as a terminal would show it: of a progress bar, the last state only."""
        # A progress bar overwrites its line by carriage returns. torch prefixes tracebacks with the rank itself.
        shown = line.rstrip(b"\r").rpartition(b"\r")[2].removeprefix(b"[rank%d]: " % rank)
        if shown.strip():
            with suppress(OSError):  # our own stderr is closed
                os.write(2, b"[rank %d] %s\n" % (rank, shown))
