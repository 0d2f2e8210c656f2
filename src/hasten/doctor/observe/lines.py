"""Which lines of the script the training thread is in: looked up now and then from another thread.

This shows what no tap does: the script's own code between the calls that are listened to, line by line. A look costs
some 20 us. The thread that looks needs the interpreter's lock, and gets it where the script lets go of it: in torch's
longer operations, or, in pure Python, after the interpreter's switch interval. By default that is 5 ms, many a whole
step, and would show nothing but the operations; so it is shorter while there are looks.
"""

from __future__ import annotations

import os
import sys
import threading
from time import perf_counter
from types import CodeType, FrameType
from typing import Any

from hasten.doctor.observe.event_log import Whose, whose
from hasten.evidence import PHASES, Line, Phase
from hasten.evidence.recorder import Recorder
from hasten.frames import frame_of
from hasten.taps import data, modules
from hasten.taps.protocol import Session

_FROM = 3  # steps that are over when the first look is taken
_APART = ((250, 0.004), (1000, 0.01), (sys.maxsize, 0.1))  # until so many looks: seconds from one to the next
_SWITCH = 0.0005  # seconds: the interpreter's switch interval meanwhile
_LONGEST = 1.0  # seconds that one look stands for at the most: the process may have been stopped
_MOST = 40  # lines that are told
_GENERATED = "__create_fn__"  # methods of dataclasses, which lie in no file

_Mark = tuple[str, str]  # end of a file's name, name of a function
_Seen = tuple[CodeType, int, Phase, bool]  # where, its line, in which phase, whether a library was called there
_MARKS: dict[_Mark, Phase] = {
    (data.__file__, "__next__"): Phase.DATA,
    (modules.__file__, "__call__"): Phase.FORWARD,  # also where the clock rests
    (modules.__file__, "backward"): Phase.BACKWARD,
    (os.path.join("torch", "optim", "optimizer.py"), "wrapper"): Phase.OPTIMIZER,
    (os.path.join("torch", "serialization.py"), "save"): Phase.CHECKPOINT,
}


def install(session: Session) -> None:
    """Look from the third step on."""
    options = session.config.doctor
    if options is None or not options.sample:
        return
    watch = LineWatch(session, session.recorder)
    session.observers.append(watch)
    session.steps_over.tell(watch.on_step, _FROM)
    os.register_at_fork(after_in_child=watch.forked)


class LineWatch:
    """Adds up where the training thread is seen."""

    def __init__(self, session: Session, recorder: Recorder) -> None:
        self._session = session
        self._recorder = recorder
        self._codes: dict[int, tuple[CodeType, Whose, Phase | None]] = {}  # held, so that an id stays its own
        self._begin()

    def _begin(self) -> None:
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._interval = 0.0  # the script's own switch interval, while it is another
        self._seconds: dict[_Seen, float] = {}
        self._looks: dict[_Seen, int] = {}

    def forked(self) -> None:
        """In a forked child, which has no such thread: it starts again with the child's own training."""
        self._restore()
        self._begin()

    def _restore(self) -> None:
        if self._interval and abs(sys.getswitchinterval() - _SWITCH) < 1e-6:  # unless the script has set one since
            sys.setswitchinterval(self._interval)
        self._interval = 0.0

    def on_step(self, steps: int) -> int:
        """So many steps are over, in the thread that trains."""
        if self._thread is None:
            trains = threading.get_ident()
            if sys.getswitchinterval() > _SWITCH:
                self._interval = sys.getswitchinterval()
                sys.setswitchinterval(_SWITCH)
            self._thread = threading.Thread(target=self._go_on, args=(trains,), name="hasten-lines", daemon=True)
            self._thread.start()
        return sys.maxsize

    def _go_on(self, trains: int) -> None:
        last, looks = perf_counter(), 0
        with self._session.run.guard("looking where the training is"):
            while not self._over.wait(next(apart for until, apart in _APART if looks < until)):
                frame = frame_of(trains)
                if frame is None:
                    return
                now = perf_counter()
                looks += self._look(frame, min(now - last, _LONGEST))
                last = now
                del frame  # it holds the script's variables

    def _look(self, frame: FrameType | None, seconds: float) -> bool:
        """Note where the thread is; False where it is in no step, or hasten itself looks into the one it is in."""
        session, between = self._session, self._recorder.step_in_progress() < 0
        if session.looking:
            return False
        place: tuple[CodeType, int] | None = None
        phase: Phase | None = None
        library = False
        while frame is not None:
            code = frame.f_code
            _, owner, mark = self._codes.get(id(code)) or self._known(code)
            if owner is Whose.SCRIPT and place is None:
                place = code, frame.f_lineno or code.co_firstlineno
            elif place is None and owner is not Whose.OURS:
                library = True
            if mark is not None and (phase is None or mark is Phase.DATA):
                phase = mark
            frame = frame.f_back
        if place is None or (between and phase is not Phase.DATA):  # the wait for a batch begins the step
            return False
        current = self._recorder.current
        within = current.outer is not None and not current.trained
        if within or (phase is Phase.FORWARD and session.validating):
            phase = Phase.VALIDATION
        key = (*place, Phase.OTHER if phase is None else phase, library)
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds
        self._looks[key] = self._looks.get(key, 0) + 1
        return True

    def _known(self, code: CodeType) -> tuple[CodeType, Whose, Phase | None]:
        name = code.co_filename
        mark = next(
            (phase for (end, called), phase in _MARKS.items() if code.co_name == called and name.endswith(end)), None
        )
        owner = Whose.LIBRARY if code.co_qualname.startswith(_GENERATED) else whose(name)
        known = self._codes[id(code)] = (code, owner, mark)
        return known

    def facts(self) -> dict[str, Any]:
        """The lines the thread was seen in most."""
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        self._restore()
        total = sum(self._seconds.values())
        # The function that holds the training loop is the one that calls backward or steps the optimizer.
        loops = {code for code, _, phase, _ in self._seconds if phase in (Phase.BACKWARD, Phase.OPTIMIZER)}
        lines = [
            Line(
                f"{code.co_filename}:{number}",
                "" if code.co_name == "<module>" else code.co_qualname,
                PHASES[phase],
                seconds / total,
                self._looks[code, number, phase, library],
                code in loops,
                library,
            )
            for (code, number, phase, library), seconds in self._seconds.items()
        ]
        return {"lines": tuple(sorted(lines, key=lambda line: -line.share)[:_MOST])} if total > 0 else {}
