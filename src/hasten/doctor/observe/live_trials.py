"""Switches cures on and off in the running training, once doctor has heard enough of it as it is.

The evidence is closed by then; of what comes behind only the blocks' times are kept (`Evidence.tried`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING

from hasten.doctor.observe.compiled import has_compiled
from hasten.evidence import Evidence, Phase, TriedLive
from hasten.evidence.interval import mean_of
from hasten.evidence.weigh import COMPUTE, LEAST, seconds_of, steady_seconds
from hasten.online.blocks import Open, Wish, synchronize
from hasten.online.eligibility import ranks_joined
from hasten.plan import Setting
from hasten.switchboard import Switchboard
from hasten.taps.steps_over import Listener
from hasten.techniques import Resource, toml_value

if TYPE_CHECKING:
    from hasten.doctor.rule import Rule
    from hasten.evidence.recorder import Recorder
    from hasten.taps.protocol import Session

_BLOCK = 0.5  # seconds of a block, or four steps if they take longer
_LONG = 1.0  # seconds of a step, of which one is a block then
_PAIRS, _MOST = 4, 8  # blocks with and without: if these do not tell for certain, up to so many
_LEAST_PAIRS = 3  # of fewer nothing is said
_SKIP, _FIRST_SKIP = 2, 4  # steps behind a switch that do not count, and behind the first: kernels are made
_RELIEVED = {Resource.COMPUTE: COMPUTE, Resource.MEMORY: (Phase.FORWARD,), Resource.OPTIMIZER: (Phase.OPTIMIZER,)}
_NO_TIME = "there was no time left for it"

Sides = list[tuple[float, float, int]]
"""Of each pair: seconds of a step without and with, and how many steps the two blocks had."""


def install(session: Session) -> None:
    """Have changes tried once the session's bounds are reached."""
    session.try_changes = functools.partial(begin, session)


def begin(session: Session, seconds: float, bound: Listener) -> bool:
    """Doctor has heard enough: whether something is switched on and off in the run before it ends.

    Called between two steps, in the training's thread.

    Args:
        session: The process's session.
        seconds: For all of it at the most.
        bound: Is told of steps meanwhile too; nobody else is.
    """
    board, recorder = session.run, session.run.recorder
    if not isinstance(board, Switchboard) or recorder is None or session.tried is not None:
        return False
    if session.rank or ranks_joined() > 1:  # where ranks wait for each other, one of them cannot be switched
        return False
    try:
        session.ended = "complete"
        session.recorded = recorder.so_far()
        session.heard = session.evidence_of(session.recorded, asks=False)
        trying = LiveTrials(board, recorder, session.heard, seconds, session.complete)
    except Exception as error:  # a tap never breaks a script
        session.run.skip("trying changes in the run", error)
        return False
    if not trying.wanted:
        return False
    session.tried = trying.tried
    session.steps_over.only(bound)
    session.steps_over.tell(trying.on_step)
    trying.begin()
    return True


class LiveTrials:
    """Asks for blocks with and without each cure, in turn, and measures them.

    Args:
        board: Switches techniques.
        recorder: Says how long steps took.
        evidence: What was heard until now.
        seconds: For all of it at the most.
        over: Called once all is tried, or the time is up.

    Attributes:
        wanted: What is tried: the finding it is about, and which techniques are switched for it.
    """

    def __init__(
        self, board: Switchboard, recorder: Recorder, evidence: Evidence, seconds: float, over: Callable[[], None]
    ) -> None:
        self._board, self._recorder, self._tell = board, recorder, over
        self._until = time.monotonic() + seconds
        self._step = steady_seconds(evidence)
        # Imported here, in front of the first block: the readers of source code come with it.
        from hasten.doctor.findings import FINDINGS

        wanted = [(rule, on) for rule in FINDINGS.values() if (on := self._to_try(rule, evidence))]
        # What may bring most comes first: there may be no time for all.
        self.wanted = sorted(wanted, key=lambda one: -_relieved(one[0], evidence))
        self._sides: dict[str, Sides] = {}
        self._cut: set[str] = set()  # of what there was no time for
        self._last_pass = next((one.batches for one in reversed(evidence.passes[:-1]) if one.trained), 0)
        self._open: Open | None = None
        self._blocks = self._course()

    def _to_try(self, rule: type[Rule], evidence: Evidence) -> dict[str, Setting]:
        if rule.cure is not None and rule.cure.relieves is Resource.COMPUTE and has_compiled():
            return {}  # what is compiled would be compiled once more, for minutes
        with self._board.guard(f"trying the cure of {rule.name}"):
            return rule.to_try(evidence)
        return {}  # evidence like no other

    def begin(self) -> None:
        """Ask for the first block."""
        self._next(None)

    def on_step(self, steps: int) -> None:
        """A step is over."""
        block = self._open
        if block is None:
            return
        if time.monotonic() > self._until:
            self._end()
            return
        began = self._recorder.now()
        if block.step(self._recorder, max(0, self._recorder.current.batches), 0, self._last_pass):
            measured = block.over()
            self._next((measured.step_seconds, measured.steps))
        if self._open is not None:
            self._open.between = self._recorder.now() - began

    def _next(self, measured: tuple[float, int] | None) -> None:
        try:
            on, skip = next(self._blocks) if measured is None else self._blocks.send(measured)
        except StopIteration:
            self._end()
            return
        if dict(on) != self._board.on:
            self._board.switch(on)
        elif measured is not None:
            skip = 0
        long = self._step > _LONG
        self._open = Open(
            Wish(frozenset(), "try", skip=skip), frozenset(), self._step / 8 if long else _BLOCK, synchronize,
            fewest=1 if long else 2,
        )  # fmt: skip

    def _end(self) -> None:
        self._open = None
        self._board.switch({})
        self._tell()

    # -- which blocks ------------------------------------------------------------------------------------

    def _course(self) -> Generator[tuple[Mapping[str, Setting], int], tuple[float, int], None]:
        """Four pairs of each; then more of those that did not tell."""
        for most in (_PAIRS, _MOST):
            for rule, on in self.wanted:
                cure = next(iter(on))
                sides = self._sides.setdefault(rule.name, [])
                if not sides and time.monotonic() + _LEAST_PAIRS * 2 * self._length() > self._until:
                    self._cut.add(rule.name)
                while len(sides) < most and rule.name not in self._cut and not self._is_known(cure, sides):
                    yield from self._pair(on, sides)

    def _pair(
        self, on: Mapping[str, Setting], sides: Sides
    ) -> Generator[tuple[Mapping[str, Setting], int], tuple[float, int], None]:
        """A block without and one with, in this order and in the other by turns."""
        turned = len(sides) % 2
        found: dict[bool, tuple[float, int]] = {}
        for wanted in (True, False) if turned else (False, True):
            skip = 1 if self._step > _BLOCK else _SKIP if sides else _FIRST_SKIP
            found[wanted] = yield (on if wanted else {}), skip
        self._step = found[False][0]
        sides.append((found[False][0], found[True][0], found[False][1] + found[True][1]))

    def _length(self) -> float:
        """Seconds that a block is expected to take, with the steps in front of it that do not count."""
        step = self._step
        if step > _LONG:
            return 1.7 * step
        return (
            max(_BLOCK, min(4 * step, max(2 * step, 4 * _BLOCK))) + step
        )  # of two that do not count, before every other block

    def _is_known(self, cure: str, sides: Sides) -> bool:
        """Whether no more blocks are asked for: it broke, or they tell for certain."""
        if cure in self._board.broken:
            return True
        found = mean_of([math.log(off / on) for off, on, _ in sides]) if len(sides) >= _PAIRS else None
        return found is not None and (found.low > 0 or found.high < -math.log(1 - LEAST))

    # -- what they showed --------------------------------------------------------------------------------

    def tried(self) -> tuple[TriedLive, ...]:
        """Return what was tried until now, for the evidence."""
        return tuple(self._told(rule, on) for rule, on in self.wanted)

    def _told(self, rule: type[Rule], on: Mapping[str, Setting]) -> TriedLive:
        cure = next(iter(on))
        besides = tuple(f"{name} = {toml_value(setting)}" for name, setting in on.items() if name != cure)
        setting = on[cure]
        told = TriedLive(rule.name, cure, setting if isinstance(setting, str) else toml_value(setting), besides)
        sides = self._sides.get(rule.name, [])
        if broken := next((self._board.broken[name] for name in on if name in self._board.broken), ""):
            return dataclasses.replace(told, failed=broken)
        found = mean_of([math.log(off / with_it) for off, with_it, _ in sides])
        if found is None or len(sides) < _LEAST_PAIRS:
            return dataclasses.replace(told, failed=_NO_TIME)
        return dataclasses.replace(
            told,
            ratio=math.exp(found.mean),
            low=math.exp(found.low),
            high=math.exp(min(found.high, 20.0)),
            blocks=len(sides),
            steps=sum(many for _, _, many in sides) / 2 / len(sides),
            before=statistics.fmean(off for off, _, _ in sides),
        )


def _relieved(rule: type[Rule], evidence: Evidence) -> float:
    """Seconds of a step in which its cure may save something."""
    return seconds_of(evidence, *_RELIEVED.get(rule.cure.relieves, ())) if rule.cure is not None else 0.0
