"""Try cures by switching their techniques on and off in the running training.

This begins once doctor has recorded enough of the unchanged training. The evidence is complete then; of the steps that
follow, only the times of the blocks are kept (`Evidence.tried`). Each cure is measured in pairs of blocks, one with its
techniques and one without, whose order alternates, so that a drift of the training's pace does not favor either side.
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
from hasten.evidence import Evidence, LiveTrial, Phase
from hasten.evidence.interval import mean_of
from hasten.evidence.weigh import COMPUTE, LEAST, seconds_of, steady_seconds
from hasten.online.blocks import BlockRequest, OpenBlock, synchronize
from hasten.online.eligibility import ranks_joined
from hasten.plan import Setting
from hasten.switchboard import Switchboard
from hasten.taps.step_listeners import Listener
from hasten.techniques import Resource, toml_value

if TYPE_CHECKING:
    from hasten.doctor.rule import Rule
    from hasten.evidence.recorder import Recorder
    from hasten.taps.protocol import Session

_BLOCK = 0.5  # seconds of a block, or four steps if they take longer
_LONG = 1.0  # seconds; if a step takes longer, a block is a single step
_PAIRS, _MOST = 4, 8  # pairs of blocks per cure at first, and at most if those do not decide
_LEAST_PAIRS = 3  # with fewer pairs no result is given
_SKIP, _FIRST_SKIP = 2, 4  # warm-up steps after a switch, and after the first, in which kernels are built
_RELIEVED = {Resource.COMPUTE: COMPUTE, Resource.MEMORY: (Phase.FORWARD,), Resource.OPTIMIZER: (Phase.OPTIMIZER,)}
_NO_TIME = "there was no time left for it"

Sides = list[tuple[float, float, int]]
"""Per pair of blocks: seconds of a step without and with the cure, and how many steps both blocks had together."""


def install(session: Session) -> None:
    """Register `begin`, to be called once the session's bounds are reached."""
    session.try_changes = functools.partial(begin, session)


def begin(session: Session, seconds: float, bound: Listener) -> bool:
    """Begin to try changes, if there are any to try. Return whether there are; then the run goes on until all is tried.

    Call it between two steps, in the training's thread.

    Args:
        session: The process's session.
        seconds: For all trials together, at most.
        bound: The only other listener that goes on being called after steps.
    """
    board, recorder = session.run, session.run.recorder
    if not isinstance(board, Switchboard) or recorder is None or session.tried is not None:
        return False
    if session.rank or ranks_joined() > 1:  # where ranks wait for each other, one of them cannot be switched
        return False
    try:
        session.ended = "complete"
        session.recorded = recorder.so_far()
        session.evidence_before_trials = session.evidence_of(session.recorded, may_probe=False)
        trials = LiveTrials(board, recorder, session.evidence_before_trials, seconds, session.complete)
    except Exception as error:  # a tap never breaks a script
        session.run.skip("trying changes in the run", error)
        return False
    if not trials.planned:
        return False
    session.tried = trials.tried
    session.step_listeners.keep_only(bound)
    session.step_listeners.add(trials.on_step)
    trials.begin()
    return True


class LiveTrials:
    """Runs blocks with and without each cure, and measures them.

    Args:
        board: Switches techniques.
        recorder: Tells how long steps took.
        evidence: What was recorded of the unchanged training.
        seconds: For all trials together, at most.
        over: Called once all is tried, or the time is up.

    Attributes:
        planned: What to try: the finding's rule, and the techniques to switch on for it with their settings.
    """

    def __init__(
        self, board: Switchboard, recorder: Recorder, evidence: Evidence, seconds: float, on_end: Callable[[], None]
    ) -> None:
        self._board, self._recorder, self._on_end = board, recorder, on_end
        self._until = time.monotonic() + seconds
        self._step = steady_seconds(evidence)
        # Not imported at the top, because the readers of source code come with it; and before the first block, so that
        # the import is in none.
        from hasten.doctor.findings import FINDINGS

        planned = [(rule, on) for rule in FINDINGS.values() if (on := self._to_try(rule, evidence))]
        # The cures that may save most come first: there may be no time for all.
        self.planned = sorted(planned, key=lambda plan: -_relieved(plan[0], evidence))
        self._sides: dict[str, Sides] = {}
        self._cut: set[str] = set()  # names of findings that there was no time for
        self._last_pass = next(
            (data_pass.batches for data_pass in reversed(evidence.passes[:-1]) if data_pass.trained), 0
        )
        self._open: OpenBlock | None = None
        self._blocks = self._schedule()

    def _to_try(self, rule: type[Rule], evidence: Evidence) -> dict[str, Setting]:
        """Return the techniques to switch on for a finding, with their settings; empty if it cannot be tried here."""
        if rule.cure is not None and rule.cure.relieves is Resource.COMPUTE and has_compiled():
            return {}  # the switch would make torch.compile recompile, for minutes
        with self._board.guard(f"trying the cure of {rule.name}"):
            return rule.to_try(evidence)
        return {}  # the rule failed on this evidence: the guard has recorded it

    def begin(self) -> None:
        """Start the first block."""
        self._next(None)

    def on_step(self, steps: int) -> None:
        """Count a step to the current block, and start the next block when it is full."""
        block = self._open
        if block is None:
            return
        if time.monotonic() > self._until:
            self._end()
            return
        started = self._recorder.now()
        if block.step(self._recorder, max(0, self._recorder.current.batches), 0, self._last_pass):
            measured = block.finish()
            self._next((measured.step_seconds, measured.steps))
        if self._open is not None:
            self._open.between = self._recorder.now() - started

    def _next(self, measured: tuple[float, int] | None) -> None:
        """Pass a block's seconds per step and number of steps to the course, and start the block it asks for next."""
        try:
            on, skip = next(self._blocks) if measured is None else self._blocks.send(measured)
        except StopIteration:
            self._end()
            return
        if dict(on) != self._board.on:
            self._board.switch(on)
        elif measured is not None:  # the previous block had the same techniques on: no warm-up
            skip = 0
        long = self._step > _LONG
        self._open = OpenBlock(
            BlockRequest(frozenset(), "try", skip=skip), frozenset(), self._step / 8 if long else _BLOCK, synchronize,
            fewest=1 if long else 2,
        )  # fmt: skip

    def _end(self) -> None:
        """Switch everything off, and report that the trials are over."""
        self._open = None
        self._board.switch({})
        self._on_end()

    # -- which blocks ------------------------------------------------------------------------------------

    def _schedule(self) -> Generator[tuple[Mapping[str, Setting], int], tuple[float, int], None]:
        """Yield the techniques and warm-up steps of each block; be sent its seconds per step and number of steps.

        Each cure gets `_PAIRS` pairs first; then those that are not decided get up to `_MOST`.
        """
        for most in (_PAIRS, _MOST):
            for rule, on in self.planned:
                cure = next(iter(on))
                sides = self._sides.setdefault(rule.name, [])
                if not sides and time.monotonic() + _LEAST_PAIRS * 2 * self._length() > self._until:
                    self._cut.add(rule.name)
                while len(sides) < most and rule.name not in self._cut and not self._is_decided(cure, sides):
                    yield from self._pair(on, sides)

    def _pair(
        self, on: Mapping[str, Setting], sides: Sides
    ) -> Generator[tuple[Mapping[str, Setting], int], tuple[float, int], None]:
        """Run a pair of blocks, without and with the techniques; every second pair in reverse order."""
        reverse = len(sides) % 2
        measured: dict[bool, tuple[float, int]] = {}
        for switched_on in (True, False) if reverse else (False, True):
            skip = 1 if self._step > _BLOCK else _SKIP if sides else _FIRST_SKIP
            measured[switched_on] = yield (on if switched_on else {}), skip
        self._step = measured[False][0]
        sides.append((measured[False][0], measured[True][0], measured[False][1] + measured[True][1]))

    def _length(self) -> float:
        """Return the seconds that a block is expected to take, with its warm-up steps."""
        step = self._step
        if step > _LONG:
            return 1.7 * step
        return (
            max(_BLOCK, min(4 * step, max(2 * step, 4 * _BLOCK))) + step
        )  # two warm-up steps before every second block: one per block

    def _is_decided(self, cure: str, sides: Sides) -> bool:
        """Return whether a cure needs no more blocks: it broke, or its effect is certain.

        Certain means that the interval of its speed-up lies above 1, or below what would be worth reporting.
        """
        if cure in self._board.broken:
            return True
        gain = mean_of([math.log(off / on) for off, on, _ in sides]) if len(sides) >= _PAIRS else None
        return gain is not None and (gain.low > 0 or gain.high < -math.log(1 - LEAST))

    # -- results -----------------------------------------------------------------------------------------

    def tried(self) -> tuple[LiveTrial, ...]:
        """Return the results so far, for the evidence."""
        return tuple(self._result(rule, on) for rule, on in self.planned)

    def _result(self, rule: type[Rule], on: Mapping[str, Setting]) -> LiveTrial:
        cure = next(iter(on))
        also_on = tuple(f"{name} = {toml_value(setting)}" for name, setting in on.items() if name != cure)
        setting = on[cure]
        result = LiveTrial(rule.name, cure, setting if isinstance(setting, str) else toml_value(setting), also_on)
        sides = self._sides.get(rule.name, [])
        if broken := next((self._board.broken[name] for name in on if name in self._board.broken), ""):
            return dataclasses.replace(result, failed=broken)
        gain = mean_of([math.log(off / on_seconds) for off, on_seconds, _ in sides])
        if gain is None or len(sides) < _LEAST_PAIRS:
            return dataclasses.replace(result, failed=_NO_TIME)
        return dataclasses.replace(
            result,
            ratio=math.exp(gain.mean),
            low=math.exp(gain.low),
            high=math.exp(min(gain.high, 20.0)),
            blocks=len(sides),
            steps=sum(steps for _, _, steps in sides) / 2 / len(sides),
            before=statistics.fmean(off for off, _, _ in sides),
        )


def _relieved(rule: type[Rule], evidence: Evidence) -> float:
    """Return the seconds of a step that a finding's cure may save something of."""
    return seconds_of(evidence, *_RELIEVED.get(rule.cure.relieves, ())) if rule.cure is not None else 0.0
