"""A block as it is measured: which of a training's steps count, and when there are enough of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hasten.evidence import ASIDE, Phase, net_seconds
from hasten.online.cpu_contention import Reading
from hasten.online.record import Measured

if TYPE_CHECKING:
    from hasten.evidence.recorder import Recorder

_LEAST_STEPS = 4
_FEW = 2  # are enough where they take as long as four blocks
_SHORT_PASS = 4  # batches: in shorter passes the first step counts too, or none would
_UNSETTLED = 3.0  # times the expected step: something is still compiled, filled or started


@dataclass(frozen=True)
class Wish:
    """A block that is asked for.

    Attributes:
        on: Indices of the candidates that shall be on.
        part: Of the course, for the record.
        exact: Begin only in a pass that has the wanted techniques of its own (workers, a cache) on; otherwise those
            of the pass that goes on stay, and the wanted come with the next.
        skip: Steps behind the switch that do not count.
        expected: Seconds a step is expected to take; 0.0: not known. While steps take a multiple, they do not count.
    """

    on: frozenset[int]
    part: str
    exact: bool = False
    skip: int = 2
    expected: float = 0.0


@dataclass
class Open:
    """A block that goes on.

    Attributes:
        fewest: Steps that are enough where they take as long as four blocks.
        root: The process that started all of the training; None: this one.
        skipped: Seconds of the steps behind the switch that did not count.
        between: Seconds behind the last step that were not the training's, but the search's own: a switch, what it
            reckons, waiting for the device. The recorder has them in the step that follows; they count in none.
    """

    wish: Wish
    on: frozenset[int]
    least_seconds: float
    sync: Callable[[], None]
    fewest: int = _FEW
    root: int | None = None
    left_out: int = 0
    skipped: float = 0.0
    between: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    began: float = 0.0
    phases: list[float] = field(default_factory=lambda: [0.0] * len(Phase))

    def __post_init__(self) -> None:
        self.reading = Reading(self.root)
        self.slow_since: Reading | None = None
        self.now: Callable[[], float] = time.perf_counter  # the recorder's clock

    def step(self, recorder: Recorder, number: int, ready: int, last_pass: int) -> bool:
        """A step is over; whether the block is.

        Args:
            recorder: Has it as its last.
            number: Of its batch in the pass, from 1; 0 outside of one.
            ready: Batches that workers had made before the pass's first was asked for.
            last_pass: Batches of the pass before; 0 where there was none.
        """
        self.now = recorder.now
        phases = self._without_what_is_ours(recorder)
        net = net_seconds(phases)
        if self._is_left_out(net, number, ready, last_pass):
            if not self.steps:
                if self.left_out >= self.wish.skip:
                    self.sync()  # what the device has still to do belongs to steps that do not count
                self.reading = Reading(self.root)
            return False
        if not self.steps:
            self.began = time.monotonic() - net
        self.steps += 1
        self.seconds += net
        for phase in Phase:
            if phase not in ASIDE:
                self.phases[phase] += phases[phase]
        if self.seconds < self.least_seconds or self.steps < self.fewest:
            return False
        return self.steps >= _LEAST_STEPS or self.seconds >= 4 * self.least_seconds

    def _without_what_is_ours(self, recorder: Recorder) -> list[float]:
        """Phases of the last step, without the seconds before it that were the search's own."""
        phases = list(recorder.last[0])
        # A step begins where its batch is asked for; without a loader, where the optimizer's step before it was over.
        phase = Phase.DATA if recorder.step_of == "batch" else Phase.OTHER
        phases[phase] = max(0.0, phases[phase] - self.between)
        self.between = 0.0
        return phases

    def _is_left_out(self, net: float, number: int, ready: int, last_pass: int) -> bool:
        """Whether a step, the `number`-th of its pass, is not like the steady ones."""
        if self.left_out < self.wish.skip:
            self.left_out += 1
            self.skipped += net
            return True
        if not self.steps and self.wish.expected and net > _UNSETTLED * self.wish.expected and not self._disturbed():
            self.skipped += net
            return True
        short = 0 < last_pass < _SHORT_PASS
        bought = min(ready, last_pass // 3) if last_pass else ready
        return bool(number and not short and number <= max(1, bought))

    def _disturbed(self) -> bool:
        """Whether others were in the way since steps began to take a multiple: then waiting for the end may be long."""
        self.slow_since = self.slow_since or self.reading
        return self.slow_since.taken().disturbs

    def over(self) -> Measured:
        """The block as it was measured."""
        before = self.now()
        self.sync()
        self.seconds += self.now() - before
        mean = tuple(seconds / self.steps for seconds in self.phases)
        taken, on = self.reading.taken(), tuple(sorted(self.on))
        return Measured(self.began, self.seconds, self.steps, on, self.wish.part, mean, "", taken.share, taken.disturbs)


def is_bad(recorder: Recorder) -> bool:
    """Whether the last step's loss is NaN or infinite; reads it from the device."""
    return any(not math.isfinite(float(loss.detach().float().mean())) for loss in recorder.last[1])


def synchronize() -> None:
    """Wait until the device has done what it was given."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
