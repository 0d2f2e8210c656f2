"""Watchdog: stops a training on a signal even when it hangs.

Python runs signal handlers in the main thread, between bytecode instructions: never while that thread waits in native
code for a rank that does not answer, and without effect while it waits for a loader's worker. So a thread reads the
signals too, from a pipe that the interpreter's C handler writes to at once (`signal.set_wakeup_fd`).
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
_OVER = 0  # end of the watch; no signal has this number
# Helpers that clean up shared memory after the processes they serve, and exit when those are gone: not to be killed.
_CLEANERS = ("resource_tracker", "torch_shm_manager")


class Watchdog:
    """Ends this process, and all that it started, on a second Ctrl-C, or when a training asked to stop hangs.

    A training that was asked to stop may take as long as it needs while it progresses (training or validation batches).
    It counts as hung after a time without progress: ten times the mean time of a batch so far, at least 20 s; 60 s
    before the first batch; at most 10 minutes, and 10 minutes while it saves. The environment variable
    HASTEN_STOP_SECONDS sets another time.

    Args:
        trainer: The Trainer whose stage is watched; `signals.watched` sets the process's signal handlers.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._started = time.monotonic()
        self._batches = trainer.progress.total_batches
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = -1
        self._stop_signals: frozenset[int] = frozenset()
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="hasten-watchdog", daemon=True)

    def start(self, asks: Collection[int]) -> None:
        """Start watching; call it in the main thread.

        Args:
            asks: The signals that ask the training to stop; others are ignored.
        """
        self._stop_signals = frozenset(asks)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        _watching.append(self)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; call it in the main thread."""
        _watching.remove(self)
        signal.set_wakeup_fd(self._before, warn_on_full_buffer=False)
        os.write(self._writer, bytes([_OVER]))
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def forked(self) -> None:
        """Detach a forked process: its signals must not reach its parent's watchdog."""
        with contextlib.suppress(ValueError):  # not forked from the main thread of the main interpreter
            signal.set_wakeup_fd(-1)

    def end_now(self, number: int, why: str) -> None:
        """End this process and all that it started, without saving. Does not return."""
        if not self._ending.acquire(blocking=False):
            time.sleep(60)  # another thread is already ending the process
        messages.tell_from_handler(f"hasten: {why}")
        _ignore_deaths()
        end_descendants()
        self._trainer.checkpointing.abandon()
        with contextlib.suppress(OSError):
            if os.isatty(1):
                os.write(1, b"\x1b[?25h")  # the progress line hides the cursor
        os._exit(128 + number)

    def _watch(self) -> None:
        """Read signals from the pipe; once asked to stop, end the process if it makes no progress."""
        stopped_by, moved, since = 0, None, 0.0
        while True:
            ready, _, _ = select.select([self._reader], [], [], _POLL if stopped_by else None)
            for number in os.read(self._reader, 256) if ready else b"":
                if number == _OVER:
                    return
                self._pass_on(number)
                if stopped_by and number == signal.SIGINT and not is_interactive():
                    self.end_now(number, "stopped at once, nothing was saved")
                if not stopped_by and number in self._stop_signals:
                    stopped_by, since = number, time.monotonic()
            if not stopped_by:
                continue
            if (now := self._progress()) != moved:
                moved, since = now, time.monotonic()
            elif time.monotonic() - since > (limit := self._limit()):
                self.end_now(
                    stopped_by, f"nothing has moved for {limit:.0f} s, so the training was ended, and not saved"
                )

    def _pass_on(self, number: int) -> None:
        """Forward a signal to the previous wakeup descriptor: an event loop (asyncio) may wait for signals there."""
        if self._before >= 0:
            with contextlib.suppress(OSError):
                os.write(self._before, bytes([number]))

    def _progress(self) -> tuple[Any, ...]:
        """Return values that change whenever the training makes progress."""
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
        """Return the seconds without progress after which the training counts as hung."""
        if seconds := os.environ.get(SECONDS):
            with contextlib.suppress(ValueError):
                return float(seconds)
        if self._trainer.engine.stopping.interrupted or self._trainer.checkpointing.saver.works:
            return _MOST
        done = self._trainer.progress.total_batches - self._batches
        if not done:
            return _UNKNOWN
        return min(max(_LEAST, 10 * (time.monotonic() - self._started) / done), _MOST)


def is_interactive() -> bool:
    """Return whether this is an interactive session, which Ctrl-C must not end."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def _ignore_deaths() -> None:
    """Ignore SIGCHLD: torch's handler would raise in the main thread when a worker is killed here.

    By libc, since Python sets handlers only in the main thread, and this runs in another.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        library.signal(int(signal.SIGCHLD), 1)  # SIG_IGN


def end_descendants() -> None:
    """Kill all descendants of this process."""
    for _ in range(3):  # a process that was being forked is found in the next round
        children = [child for child in psutil.Process().children(recursive=True) if not _cleans_up(child)]
        if not children:
            return
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, 1.0)


def _cleans_up(process: psutil.Process) -> bool:
    """Return whether a process need not be killed: it is a cleaner, a zombie, or has ended."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE or any(
            name in word for word in process.cmdline() for name in _CLEANERS
        )
    except psutil.Error:  # it has ended
        return True


_watching: list[Watchdog] = []


def _after_fork() -> None:
    for watchdog in _watching[-1:]:
        watchdog.forked()


os.register_at_fork(after_in_child=_after_fork)
