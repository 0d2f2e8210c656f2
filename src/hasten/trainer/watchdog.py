"""Watchdog: a training that hangs can be stopped all the same.

Python runs a signal's handler in the main thread, between two of its own instructions: never, while that thread waits
in native code for a rank that does not answer, and to no avail while it waits for a loader's worker. So a thread reads
the signals too, from a pipe into which the interpreter writes them at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import psutil

from hasten import messages

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer

SECONDS = "HASTEN_STOP_SECONDS"
_LEAST, _UNKNOWN, _MOST = 20.0, 60.0, 600.0
_POLL = 0.25
_OVER = 0  # no signal has this number
# They clean up after the processes that they serve, when all of those are gone, and then end by themselves.
_CLEANERS = ("resource_tracker", "torch_shm_manager")


class Watchdog:
    """Ends this process, and all that it started, on a second Ctrl-C, or when a training asked to stop does not.

    A training that was asked to stop has as long as it takes, while something moves: batches, validation batches. When
    nothing has moved for a while, it hangs: for ten times the mean time of a batch so far, 20 s at the least, 60 s
    before the first batch, 10 minutes at the most and while it saves; or for what the environment variable
    HASTEN_STOP_SECONDS says.

    Args:
        trainer: Whose stage is watched; its process's signal handlers are set by `signals.watched`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._began = time.monotonic()
        self._batches = trainer.progress.total_batches
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = -1
        self._asks: frozenset[int] = frozenset()
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="hasten-watchdog", daemon=True)

    def start(self, asks: Collection[int]) -> None:
        """Begin; in the main thread.

        Args:
            asks: Signals that ask the training to stop; what others mean is not this watchdog's business.
        """
        self._asks = frozenset(asks)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        _watching.append(self)
        self._thread.start()

    def close(self) -> None:
        """End the watch; in the main thread."""
        _watching.remove(self)
        signal.set_wakeup_fd(self._before, warn_on_full_buffer=False)
        os.write(self._writer, bytes([_OVER]))
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def forked(self) -> None:
        """Let a forked process's signals be its own."""
        with contextlib.suppress(ValueError):  # not forked from the main thread of the main interpreter
            signal.set_wakeup_fd(-1)

    def end_now(self, number: int, why: str) -> None:
        """End this process and all that it started, without saving; does not return."""
        if not self._ending.acquire(blocking=False):
            time.sleep(60)  # the other thread does it
        messages.tell_from_handler(f"hasten: {why}")
        _ignore_deaths()
        end_descendants()
        self._trainer.checkpointing.abandon()
        with contextlib.suppress(OSError):
            if os.isatty(1):
                os.write(1, b"\x1b[?25h")  # the progress line hides the cursor
        os._exit(128 + number)

    def _watch(self) -> None:
        asked, moved, since = 0, None, 0.0
        while True:
            ready, _, _ = select.select([self._reader], [], [], _POLL if asked else None)
            for number in os.read(self._reader, 256) if ready else b"":
                if number == _OVER:
                    return
                self._pass_on(number)
                if asked and number == signal.SIGINT and not is_interactive():
                    self.end_now(number, "stopped at once, nothing was saved")
                if not asked and number in self._asks:
                    asked, since = number, time.monotonic()
            if not asked:
                continue
            if (now := self._progress()) != moved:
                moved, since = now, time.monotonic()
            elif time.monotonic() - since > (limit := self._limit()):
                self.end_now(asked, f"nothing has moved for {limit:.0f} s, so the training was ended, and not saved")

    def _pass_on(self, number: int) -> None:
        """An event loop that waits for signals in the same way still gets them."""
        if self._before >= 0:
            with contextlib.suppress(OSError):
                os.write(self._before, bytes([number]))

    def _progress(self) -> tuple[Any, ...]:
        trainer = self._trainer
        point = None if trainer.engine.loop is None else trainer.progress.point
        return (
            trainer.progress.total_batches,
            trainer.progress.evaluated_batches,
            trainer.stage.stage,
            point,
            trainer.engine.stopping.interrupted,
        )

    def _limit(self) -> float:
        """Seconds without a move after which the training hangs."""
        if seconds := os.environ.get(SECONDS):
            with contextlib.suppress(ValueError):
                return float(seconds)
        if self._trainer.engine.stopping.interrupted or self._trainer.checkpointing.saver.works:
            return _MOST
        done = self._trainer.progress.total_batches - self._batches
        if not done:
            return _UNKNOWN
        return min(max(_LEAST, 10 * (time.monotonic() - self._began) / done), _MOST)


def is_interactive() -> bool:
    """Whether a person types into this process: there Ctrl-C must not end it."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def _ignore_deaths() -> None:
    """Let no handler in the main thread raise because a worker that is ended here is gone (torch's does).

    Python sets handlers in the main thread only, which is not this one.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        library.signal(int(signal.SIGCHLD), 1)  # SIG_IGN


def end_descendants() -> None:
    """Kill all that this process has started, and all that those have."""
    for _ in range(3):  # one that was being forked meanwhile is seen in the next round
        left = [one for one in psutil.Process().children(recursive=True) if not _cleans_up(one)]
        if not left:
            return
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(left, 1.0)


def _cleans_up(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE or any(
            name in word for word in process.cmdline() for name in _CLEANERS
        )
    except psutil.Error:  # gone
        return True


_watching: list[Watchdog] = []


def _after_fork() -> None:
    for watchdog in _watching[-1:]:
        watchdog.forked()


os.register_at_fork(after_in_child=_after_fork)
