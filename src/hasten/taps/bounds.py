"""End a run that doctor observes after a number of steps, passes or seconds, and write its evidence.

Steps and passes are checked by callbacks in the training's thread; seconds by a background thread, which lets the
current step finish if it can. SIGTERM and `os._exit`, which bypass Python's atexit, are caught to write the evidence
first.
"""

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
from hasten.taps.step_listeners import NEVER

if TYPE_CHECKING:
    from hasten.taps.protocol import Session

_AFTER_THE_OTHERS = 32.0  # seconds that a process that does not train waits for its children, which may train
_SPARE = 5.0  # seconds kept free before a run's time limit when changes are tried in it
_ENDED_BY = 30.0  # seconds within which doctor ends processes that wait for it


class Bounds:
    """Watches the limits of a run that doctor observes.

    Only the process that writes the evidence (rank 0) is bounded: the others then wait for it in their next collective
    operation until doctor ends them.

    Args:
        session: The process's session.
        options: The limits.
    """

    def __init__(self, session: Session, options: DoctorOptions) -> None:
        self._session = session
        self._options = options
        self._time_is_up = False
        self._first_step_at: float | None = None
        self._passes: dict[Any, int] = {}  # finished training passes, by loader
        self._thread = threading.main_thread()
        self._until = time.perf_counter() + options.seconds
        self._clock: threading.Thread | None = None

    def start(self) -> None:
        """Start watching; call it once, in the main thread."""
        self._catch_sigterm()
        self._leave_before_exit()
        if self._session.rank == 0:
            self._session.step_listeners.add(self.on_step, 1)
            self._start_the_clock()

    # -- steps and passes --------------------------------------------------------------------------------

    def on_step(self, steps: int) -> int:
        """End the run if enough steps are over; return the step to be called at next. Called at the end of a step."""
        if self._first_step_at is None:
            self._first_step_at = time.perf_counter()
            self._thread = threading.current_thread()
            self._start_the_clock()  # threads do not survive a fork, so a forked child that trains has none yet
        enough = 0 < self._options.steps <= steps
        if enough and self._options.at_least > 0:
            enough = time.perf_counter() - self._first_step_at >= self._options.at_least
        if enough and not self._time_is_up and self._try_changes():
            return NEVER  # `call_soon` still calls this function when the time is up
        if enough or self._time_is_up:
            self._session.complete()
        return max(steps + 1, self._options.steps) if self._options.steps > 0 else NEVER

    def _try_changes(self) -> bool:
        """Start trying changes in the run before it ends, if asked for and time allows; return whether it started."""
        remaining = self._until - time.perf_counter() - _SPARE if self._options.seconds > 0 else math.inf
        if not self._options.tries or remaining < _SPARE:
            return False
        begin = self._session.try_changes
        if begin is None or not begin(min(self._options.trying, remaining), self.on_step):
            return False
        # Shorten the time limit, so that a change that hangs does not use up the whole run's time.
        self._until = min(self._until, time.perf_counter() + self._options.trying + _SPARE)
        return True

    def on_pass(self, opened: OpenPass, begins: bool) -> None:
        """Count a loader's finished training passes; end the run when a pass beyond the `epochs` asked for begins."""
        loader = self._identity(opened.loader)
        if not begins:
            if opened.trained:
                self._passes[loader] = self._passes.get(loader, 0) + 1
        elif 0 < self._options.epochs <= self._passes.get(loader, 0) and self._session.rank == 0:
            self._session.complete()

    def _identity(self, index: int) -> Any:
        """Return a loader's identity, which is the same for a loader that the script rebuilds for each epoch."""
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
        while (remaining := self._until - time.perf_counter()) > 0:
            time.sleep(min(remaining, 1.0))
            if self._options.listener and not os.path.exists(f"/proc/{self._options.listener}"):
                # Doctor was killed: nobody reads the evidence. Its watcher removes the scratch folder. This process
                # must not: it sees the user's files in that folder, and would remove those that it may write.
                os._exit(1)
        session = self._session
        self._time_is_up = True  # a process that trains ends at the end of its current step, in `on_step`
        session.step_listeners.call_soon(self.on_step)
        recorder = session.run.recorder
        if recorder is None:
            return
        if recorder.steps:
            time.sleep(_patience(recorder.kept.phases))
        elif not session.listens_to_training() and self._others_write_evidence():
            return
        if session.run.recorder is None:
            return  # the training has ended in the time waited
        # The step takes far longer than those before, or there is none: end the run here, from this thread.
        session.stopped_at = "" if session.tried is not None else _place_of(self._thread)
        session.complete()

    def _others_write_evidence(self) -> bool:
        """Return whether another process, a child or the parent of this one, writes the evidence in its place.

        Called in a process that does not train, such as a launcher; waits up to 32 s for its children's evidence.
        """
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
        """Wait until doctor, which sees the evidence, ends all processes, a launcher first.

        If this process exited first, its launcher and the other ranks would report that as a failure. A process that
        doctor started directly has no launcher, and returns at once.
        """
        if os.getppid() != self._options.listener:
            Path(f"{self._session.config.evidence}.over").touch()
            time.sleep(_ENDED_BY)

    def forked(self) -> None:
        """Prepare a forked child to exit immediately once Python has finished.

        The profiler's library and torch's autograd engine wait for their threads at exit, which a fork does not
        have: for 10 s, or forever. A handler registered by glibc's `on_exit` runs before theirs, and calls `_exit` with
        the exit status.
        """
        self._first_step_at, self._clock = None, None
        self._passes = {}
        with contextlib.suppress(OSError, AttributeError):  # C libraries other than glibc have no on_exit
            library = ctypes.CDLL(None)
            library.on_exit(library._exit, None)

    def ignore_signals(self) -> None:
        """Ignore SIGINT and SIGTERM while the evidence is written; doctor kills a process that takes too long."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                with contextlib.suppress(ValueError, TypeError):  # a handler installed by native code stays
                    signal.signal(number, signal.SIG_IGN)

    # -- exits that bypass Python's atexit ---------------------------------------------------------------

    def _catch_sigterm(self) -> None:
        """Write the evidence before SIGTERM ends the process, unless the script has a handler for it."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return

        def terminated(number: int, frame: FrameType | None) -> None:
            if self._session.run.recorder is not None:
                self._session.error = self._session.error or "stopped by SIGTERM"
                self._session.leave()
            # End by the signal itself, so that the parent sees a process that SIGTERM ended.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        signal.signal(signal.SIGTERM, terminated)

    def _leave_before_exit(self) -> None:
        """Write the evidence before `os._exit`, which ends a process without running atexit handlers."""
        plain = os._exit

        def _exit(status: int) -> Any:
            if self._session.run.recorder is not None:
                self._session.leave()
            plain(status)

        os._exit = _exit


def _patience(phases: list[list[float]]) -> float:
    """Return the seconds to wait for a step's end: twice the longest of the last five, between 2 and 30."""
    longest = max((sum(step) for step in phases[-5:]), default=0.0)
    return min(30.0, max(2.0, 2 * longest))


def _place_of(thread: threading.Thread) -> str:
    """Return the script's `file:line` that a thread is at, skipping library frames; "" if unknown."""
    with contextlib.suppress(Exception):
        frame = frame_of(thread.ident)
        return caller(frame)
    return ""
