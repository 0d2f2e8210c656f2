"""Measure one block: decide which of its steps count, and when there are enough.

A block begins with a switch of techniques. Steps that say nothing about the steady pace are left out: the first ones
after the switch, the first of each pass (its batches may have waited ready), the last ones while workers are on (they
have nothing left to make, and leave the CPU to the step), steps that still compile or fill a cache, and the search's
own work between two steps. CPU time that other processes take meanwhile is recorded with the block.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hasten.evidence import ASIDE, Phase, net_seconds
from hasten.online.cpu_contention import CpuReading
from hasten.online.record import MeasuredBlock

if TYPE_CHECKING:
    from hasten.evidence.recorder import Recorder

_LEAST_STEPS = 4
_FEWEST_STEPS = 2  # steps: enough if they take as long as four blocks
_SHORT_PASS = 4  # batches: in shorter passes the first step counts too, or none would
_UNSETTLED = 3.0  # times the expected step: still compiling, filling a cache or starting workers


@dataclass(frozen=True)
class BlockRequest:
    """Request for a block, made by the schedule.

    Attributes:
        on: Indices of the candidates to have on.
        part: Part of the search that asks (search, finalists, claim, ...), for the record.
        exact: Wait for a pass that has the requested per-pass techniques (workers, a cache) on. If False, begin now
            with those of the current pass; the requested ones follow with the next pass.
        skip: Number of steps after the switch that do not count.
        expected: Expected seconds per step; 0.0 if unknown. Steps that take a multiple of it do not count.
    """

    on: frozenset[int]
    part: str
    exact: bool = False
    skip: int = 2
    expected: float = 0.0


@dataclass
class OpenBlock:
    """Block that is being measured.

    Attributes:
        fewest: Number of steps that is enough if they take as long as four blocks.
        root: Process id that started the whole training; None for this process.
        skipped: Seconds of the steps after the switch that did not count.
        between: Seconds that the search itself took after the last step (switching, computing, waiting for the
            device). The recorder adds them to the following step; they are subtracted there.
    """

    request: BlockRequest
    on: frozenset[int]
    least_seconds: float
    sync: Callable[[], None]
    fewest: int = _FEWEST_STEPS
    root: int | None = None
    left_out: int = 0
    skipped: float = 0.0
    between: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    began: float = 0.0
    phases: list[float] = field(default_factory=lambda: [0.0] * len(Phase))

    def __post_init__(self) -> None:
        self.reading = CpuReading(self.root)
        self.slow_since: CpuReading | None = None
        self.clock: Callable[[], float] = time.perf_counter  # the recorder's clock

    def step(self, recorder: Recorder, number: int, ready: int, last_pass: int) -> bool:
        """Take in the step that just ended. Return whether the block is complete.

        Args:
            recorder: Recorder whose last step this is.
            number: Number of its batch in the pass, from 1; 0 outside of a pass.
            ready: Number of batches that workers may have ready when the pass asks for its first.
            last_pass: Number of batches of the previous pass; 0 if there was none.
        """
        self.clock = recorder.now
        phases = self._without_own_time(recorder)
        net = net_seconds(phases)
        if self._is_left_out(net, number, ready, last_pass):
            if not self.steps:
                if self.left_out >= self.request.skip:
                    self.sync()  # work still queued on the device belongs to steps that do not count
                self.reading = CpuReading(self.root)
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

    def _without_own_time(self, recorder: Recorder) -> list[float]:
        """Return the last step's phases (seconds) without the time that the search itself took before it."""
        phases = list(recorder.last[0])
        # A step begins when its batch is requested; without a loader, when the previous optimizer step ended. So the
        # search's own time was recorded in the first phase of that kind.
        phase = Phase.DATA if recorder.step_of == "batch" else Phase.OTHER
        phases[phase] = max(0.0, phases[phase] - self.between)
        self.between = 0.0
        return phases

    def _is_left_out(self, net: float, number: int, ready: int, last_pass: int) -> bool:
        """Return whether the `number`-th step of its pass is not representative of steady steps."""
        if self.left_out < self.request.skip:
            self.left_out += 1
            self.skipped += net
            return True
        if (
            not self.steps
            and self.request.expected
            and net > _UNSETTLED * self.request.expected
            and not self._disturbed()
        ):
            self.skipped += net
            return True
        short = 0 < last_pass < _SHORT_PASS
        if not number or short:
            return False
        first = min(ready, last_pass // 3) if last_pass else ready
        last = min(ready, max(0, last_pass // 2 - 1))
        return number <= max(1, first) or (last > 0 and number > last_pass - last)

    def _disturbed(self) -> bool:
        """Return whether other processes have disturbed the block since its steps became slow.

        Then the steps may stay slow for long: they count, rather than being waited out.
        """
        self.slow_since = self.slow_since or self.reading
        return self.slow_since.taken().disturbs

    def finish(self) -> MeasuredBlock:
        """Return the block's measurement, after waiting for the device."""
        started = self.clock()
        self.sync()
        self.seconds += self.clock() - started
        mean = tuple(seconds / self.steps for seconds in self.phases)
        taken, on = self.reading.taken(), tuple(sorted(self.on))
        return MeasuredBlock(
            self.began, self.seconds, self.steps, on, self.request.part, mean, "", taken.share, taken.disturbs
        )


def is_bad(recorder: Recorder) -> bool:
    """Return whether the last step's loss is NaN or infinite. Copies it from the device, which synchronizes."""
    return any(not math.isfinite(float(loss.detach().float().mean())) for loss in recorder.last[1])


def synchronize() -> None:
    """Wait for all work queued on the GPU, if there is one."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
