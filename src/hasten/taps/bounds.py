"""When doctor has heard enough: ends the run after so many steps, passes or seconds, and leaves the evidence."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hasten.evidence.facts import caller
from hasten.evidence.open_pass import OpenPass
from hasten.frames import frame_of
from hasten.taps.config import DoctorOptions
from hasten.taps.steps_over import NEVER

if TYPE_CHECKING:
    from hasten.taps.protocol import Session

_AFTER_THE_OTHERS = 32.0  # seconds a process that does not train leaves to its children, which may
_SPARE = 5.0  # seconds of a run's bound that are left to its end, when changes are tried in it
_ENDED_BY = 30.0  # seconds within which doctor ends who waits for it


class Bounds:
    """Watches the bounds of a run that doctor listens to.

    Only the process that will leave the evidence (rank 0) is bounded: the others wait for it in their next collective
    operation, quietly, until doctor ends them.

    Args:
        session: The process's session.
        options: The bounds.
    """

    def __init__(self, session: Session, options: DoctorOptions) -> None:
        self._session = session
        self._options = options
        self._time_is_up = False
        self._first_step_at: float | None = None
        self._passes: dict[Any, int] = {}  # training passes that are over, by loader
        self._thread = threading.main_thread()
        self._until = time.perf_counter() + options.seconds
        self._clock: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch; call once, in the main thread."""
        self._catch_sigterm()
        self._leave_before_exit()
        if self._session.rank == 0:
            self._session.steps_over.tell(self.on_step, 1)
            self._start_the_clock()

    # -- steps and passes --------------------------------------------------------------------------------

    def on_step(self, steps: int) -> int:
        """So many steps are over: enough, or not yet."""
        if self._first_step_at is None:
            self._first_step_at = time.perf_counter()
            self._thread = threading.current_thread()
            self._start_the_clock()  # a forked child that trains has none yet
        enough = 0 < self._options.steps <= steps
        if enough and self._options.at_least > 0:
            enough = time.perf_counter() - self._first_step_at >= self._options.at_least
        if enough and not self._time_is_up and self._try_changes():
            return NEVER  # it hears of the time being up all the same
        if enough or self._time_is_up:
            self._session.complete()
        return max(steps + 1, self._options.steps) if self._options.steps > 0 else NEVER

    def _try_changes(self) -> bool:
        """Whether something is tried in the run before it ends, within the time that it has."""
        left = self._until - time.perf_counter() - _SPARE if self._options.seconds > 0 else math.inf
        if not self._options.tries or left < _SPARE:
            return False
        begin = self._session.try_changes
        if begin is None or not begin(min(self._options.trying, left), self.on_step):
            return False
        # A change that hangs is not waited for until the bound of the whole run.
        self._until = min(self._until, time.perf_counter() + self._options.trying + _SPARE)
        return True

    def on_pass(self, opened: OpenPass, began: bool) -> None:
        """A pass through a loader begins or is over: the one after the last that was asked for is not begun."""
        loader = self._alike(opened.loader)
        if not began:
            if opened.trained:
                self._passes[loader] = self._passes.get(loader, 0) + 1
        elif 0 < self._options.epochs <= self._passes.get(loader, 0) and self._session.rank == 0:
            self._session.complete()

    def _alike(self, index: int) -> Any:
        """Return a loader's identity: one that is rebuilt for each epoch is the same one again."""
        if not 0 <= index < len(self._session.loaders):
            return index
        facts = self._session.loaders[index].facts
        return facts.where, facts.samples, facts.batch_size

    # -- seconds -----------------------------------------------------------------------------------------

    def _start_the_clock(self) -> None:
        if self._options.seconds > 0 and self._clock is None:
            self._clock = threading.Thread(target=self._watch_the_clock, name="hasten-bounds", daemon=True)
            self._clock.start()

    def _watch_the_clock(self) -> None:
        while (left := self._until - time.perf_counter()) > 0:
            time.sleep(min(left, 1.0))
            if self._options.listener and not os.path.exists(f"/proc/{self._options.listener}"):
                # Doctor was killed: nobody will read what is written here. Its watcher removes that, which this process
                # must not: it sees the person's files in the scratch folder, and would remove those that it may.
                os._exit(1)
        session = self._session
        self._time_is_up = True  # a process that trains ends at its next step
        session.steps_over.hurry(self.on_step)
        recorder = session.run.recorder
        if recorder is None:
            return
        if recorder.steps:
            time.sleep(_patience(recorder.kept.phases))
        elif not session.listens_to_training() and self._others_leave_evidence():
            return
        if session.run.recorder is None:
            return  # the training ended by itself meanwhile
        session.stopped_at = "" if session.tried is not None else _place_of(self._thread)
        session.complete()

    def _others_leave_evidence(self) -> bool:
        """Whether this process, which does not train, can leave it to one that it started or was started by."""
        import psutil

        if self._session.is_helper():
            return True
        until = time.perf_counter() + _AFTER_THE_OTHERS
        while time.perf_counter() < until and psutil.Process().children():
            if os.path.exists(self._session.config.evidence):
                return True
            time.sleep(0.2)
        return os.path.exists(self._session.config.evidence)

    def wait_for_the_others(self) -> None:
        """Stay until doctor, which sees the evidence, ends all that was started, a launcher first.

        If this process went first, its launcher and the other ranks would call that a failure. One that doctor started
        itself has nobody to wait for.
        """
        if os.getppid() != self._options.listener:
            Path(f"{self._session.config.evidence}.over").touch()
            time.sleep(_ENDED_BY)

    def forked(self) -> None:
        """In a forked child: let the C library end it at once when Python is through.

        The profiler's library and torch's autograd engine have threads that a fork has not, and wait for them when the
        process exits: 10 s, or forever. `on_exit` gives `_exit` the status before they do.
        """
        self._first_step_at, self._clock = None, None
        self._passes = {}
        with contextlib.suppress(OSError, AttributeError):  # another C library than glibc has no on_exit
            library = ctypes.CDLL(None)
            library.on_exit(library._exit, None)

    def ignore_signals(self) -> None:
        """While the evidence is written, a second Ctrl-C must not spoil it; doctor kills who takes too long."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                with contextlib.suppress(ValueError, TypeError):  # a handler that is not Python's stays
                    signal.signal(number, signal.SIG_IGN)

    # -- ends that Python's atexit does not see ----------------------------------------------------------

    def _catch_sigterm(self) -> None:
        """Leave the evidence before SIGTERM ends the process, unless the script handles it itself."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return

        def terminated(number: int, frame: FrameType | None) -> None:
            if self._session.run.recorder is not None:
                self._session.error = self._session.error or "stopped by SIGTERM"
                self._session.leave()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        signal.signal(signal.SIGTERM, terminated)

    def _leave_before_exit(self) -> None:
        """`os._exit` ends a process without atexit: leave the evidence first."""
        plain = os._exit

        def _exit(status: int) -> Any:
            if self._session.run.recorder is not None:
                self._session.leave()
            plain(status)

        os._exit = _exit


def _patience(phases: list[list[float]]) -> float:
    """Seconds to wait for a step's end: twice the longest of the last, within reason."""
    longest = max((sum(step) for step in phases[-5:]), default=0.0)
    return min(30.0, max(2.0, 2 * longest))


def _place_of(thread: threading.Thread) -> str:
    """`file:line` of the script where a thread is, past libraries."""
    with contextlib.suppress(Exception):
        frame = frame_of(thread.ident)
        return caller(frame)
    return ""
