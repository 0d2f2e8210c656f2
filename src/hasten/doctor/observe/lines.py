"""Sample which line of the script the training thread is in, from another thread.

This shows what taps cannot: the script's own code between tapped calls, line by line. One sample costs some 20 us. The
sampling thread needs the interpreter's lock, which it gets when the script releases it: in torch's longer operations,
or, in pure Python, after the interpreter's switch interval. The default of 5 ms can be as long as a step, so samples
would show only the operations. The interval is therefore shortened while sampling.
"""

from __future__ import annotations

import os
import sys
import threading
from time import perf_counter
from types import CodeType, FrameType
from typing import Any

from hasten.doctor.observe.event_log import CodeOwner, code_owner
from hasten.evidence import PHASES, Phase, SampledLine
from hasten.evidence.recorder import Recorder
from hasten.frames import frame_of
from hasten.taps import data, modules
from hasten.taps.protocol import Session

_FROM = 3  # steps before the first sample
_INTERVALS = ((250, 0.004), (1000, 0.01), (sys.maxsize, 0.1))  # (until this many samples, seconds between two of them)
_SWITCH = 0.0005  # seconds: the interpreter's switch interval while sampling
_LONGEST = 1.0  # seconds that one sample may count for: the process may have been suspended
_MOST = 40  # lines in the evidence
_GENERATED = "__create_fn__"  # generated methods of dataclasses, code_owner code is in no file

_Mark = tuple[str, str]  # end of a file's name, name of a function
_Sample = tuple[CodeType, int, Phase, bool]  # code, line, phase, whether the line had called a library
# Frames on the stack that tell the phase of a sample.
_MARKS: dict[_Mark, Phase] = {
    (data.__file__, "__next__"): Phase.DATA,
    (modules.__file__, "__call__"): Phase.FORWARD,  # this frame is there even while the recorder's clock rests
    (modules.__file__, "backward"): Phase.BACKWARD,
    (os.path.join("torch", "optim", "optimizer.py"), "wrapper"): Phase.OPTIMIZER,
    (os.path.join("torch", "serialization.py"), "save"): Phase.CHECKPOINT,
}


def install(session: Session) -> None:
    """Start sampling after the first steps."""
    options = session.config.doctor
    if options is None or not options.sample:
        return
    watch = LineWatch(session, session.recorder)
    session.observers.append(watch)
    session.step_listeners.add(watch.on_step, _FROM)
    os.register_at_fork(after_in_child=watch.forked)


class LineWatch:
    """Adds up the time that the training thread was seen in each line."""

    def __init__(self, session: Session, recorder: Recorder) -> None:
        self._session = session
        self._recorder = recorder
        self._codes: dict[int, tuple[CodeType, CodeOwner, Phase | None]] = {}  # by id; held, so that no id is reused
        self._begin()

    def _begin(self) -> None:
        """Set the state of an observer that has not started."""
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._interval = 0.0  # the script's own switch interval, while ours is set; else 0
        self._seconds: dict[_Sample, float] = {}
        self._counts: dict[_Sample, int] = {}

    def forked(self) -> None:
        """Reset in a forked child, which has no sampling thread; it starts again when the child itself trains."""
        self._restore()
        self._begin()

    def _restore(self) -> None:
        """Set the script's own switch interval again."""
        if self._interval and abs(sys.getswitchinterval() - _SWITCH) < 1e-6:  # unless the script has changed it since
            sys.setswitchinterval(self._interval)
        self._interval = 0.0

    def on_step(self, steps: int) -> int:
        """Start the sampling thread; called in the training thread. Return when to be called again: never."""
        if self._thread is None:
            thread_id = threading.get_ident()
            if sys.getswitchinterval() > _SWITCH:
                self._interval = sys.getswitchinterval()
                sys.setswitchinterval(_SWITCH)
            self._thread = threading.Thread(target=self._run, args=(thread_id,), name="hasten-lines", daemon=True)
            self._thread.start()
        return sys.maxsize

    def _run(self, thread_id: int) -> None:
        """Sample the thread `thread_id` until it or the run is over. This runs in the sampling thread."""
        last, samples = perf_counter(), 0
        with self._session.run.guard("looking where the training is"):
            while not self._stopped.wait(next(interval for until, interval in _INTERVALS if samples < until)):
                frame = frame_of(thread_id)
                if frame is None:
                    return
                now = perf_counter()
                samples += self._look(frame, min(now - last, _LONGEST))
                last = now
                del frame  # it keeps the script's local variables alive

    def _look(self, frame: FrameType | None, seconds: float) -> bool:
        """Record one sample.

        Args:
            frame: The innermost frame of the training thread.
            seconds: How long the sample counts for.

        Returns:
            False if nothing was recorded: no step is running, or hasten itself profiles it.
        """
        session, between_steps = self._session, self._recorder.step_in_progress() < 0
        if session.profiling:
            return False
        place: tuple[CodeType, int] | None = None
        phase: Phase | None = None
        library = False
        while frame is not None:
            code = frame.f_code
            _, owner, mark = self._codes.get(id(code)) or self._classify(code)
            if owner is CodeOwner.SCRIPT and place is None:
                place = code, frame.f_lineno or code.co_firstlineno
            elif place is None and owner is not CodeOwner.HASTEN:
                library = True
            # The innermost mark counts, but all that runs inside a loader's `__next__` is data wait: a dataset may run
            # the forward of a model.
            if mark is not None and (phase is None or mark is Phase.DATA):
                phase = mark
            frame = frame.f_back
        if place is None or (between_steps and phase is not Phase.DATA):  # a step begins with its wait for a batch
            return False
        current = self._recorder.current
        within_step = current.outer is not None and not current.trained  # a validation loop in a training step
        if within_step or (phase is Phase.FORWARD and session.validating):
            phase = Phase.VALIDATION
        key = (*place, Phase.OTHER if phase is None else phase, library)
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds
        self._counts[key] = self._counts.get(key, 0) + 1
        return True

    def _classify(self, code: CodeType) -> tuple[CodeType, CodeOwner, Phase | None]:
        """Return, and cache, who wrote a code object and which phase it marks."""
        name = code.co_filename
        mark = next(
            (phase for (end, called), phase in _MARKS.items() if code.co_name == called and name.endswith(end)), None
        )
        owner = CodeOwner.LIBRARY if code.co_qualname.startswith(_GENERATED) else code_owner(name)
        classified = self._codes[id(code)] = (code, owner, mark)
        return classified

    def facts(self) -> dict[str, Any]:
        """Return the lines that the thread was seen in most."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        self._restore()
        total = sum(self._seconds.values())
        # The function that holds the training loop is the one that calls backward or steps the optimizer.
        loops = {code for code, _, phase, _ in self._seconds if phase in (Phase.BACKWARD, Phase.OPTIMIZER)}
        lines = [
            SampledLine(
                f"{code.co_filename}:{number}",
                "" if code.co_name == "<module>" else code.co_qualname,
                PHASES[phase],
                seconds / total,
                self._counts[code, number, phase, library],
                code in loops,
                library,
            )
            for (code, number, phase, library), seconds in self._seconds.items()
        ]
        return {"lines": tuple(sorted(lines, key=lambda line: -line.share)[:_MOST])} if total > 0 else {}
