"""The result of a search: the blocks, what is known of each technique, and the claim."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hasten.evidence.interval import middle_of
from hasten.online.course import Course
from hasten.online.cpu_contention import CpuReading
from hasten.online.record import MeasuredBlock
from hasten.plan import Setting
from hasten.tuner.proof import MachineNoise, Ratio
from hasten.tuner.trial import Trial

_APART = 15.0  # seconds between two sides of a pair, beyond which the machine's state may have changed
_LEAST_PAIRS = 3  # undisturbed pairs that a claim needs; with fewer it includes disturbed ones, and says so


@dataclass(frozen=True)
class Claim:
    """Claimed speed-up of a plan.

    Attributes:
        speedup: The speed-up with its interval.
        how: How it was measured, in words.
        disturbed: Share of the CPU that other processes took meanwhile, from 0 to 1; None if they disturbed nothing.
    """

    speedup: Ratio
    how: str
    disturbed: float | None = None


@dataclass
class SearchState:
    """State of a search: what was measured and chosen so far.

    Attributes:
        course: Estimates of the candidates.
        warm: Whether blocks of one running process were measured, rather than a process each.
        blocks: All blocks, including those that do not count.
        chosen: Indices of the plan's candidates.
        compiling: Seconds that compiling took; None if it was not tried.
        notes: Faults and other events for the report, one sentence each.
        not_measured: Candidates that were not measured for lack of time -> reason.
        would_ask: What else was left open for lack of time, one sentence each.
    """

    course: Course
    warm: bool = True
    blocks: list[MeasuredBlock] = field(default_factory=list)
    chosen: frozenset[int] = frozenset()
    compiling: float | None = None
    notes: list[str] = field(default_factory=list)
    not_measured: dict[int, str] = field(default_factory=dict)
    would_ask: list[str] = field(default_factory=list)

    def plan(self) -> dict[str, Setting]:
        """Return the chosen techniques with their settings."""
        candidates = self.course.candidates
        return {candidates[i].name: candidates[i].setting for i in sorted(self.chosen)}

    def drop(self, names: Iterable[str], reason: str, lasting: bool = False) -> None:
        """Remove techniques from the plan. If `lasting`, the next tune of this training does not try them either."""
        dropped = {i for i in self.chosen if self.course.candidates[i].name in set(names)}
        self.course.drop(dropped, reason, lasting)
        self.chosen -= dropped

    def claim_pairs(self) -> list[tuple[MeasuredBlock, MeasuredBlock]]:
        """Return the claim's pairs of blocks, (plain, plan), each measured one right after the other."""
        plan_indices = tuple(sorted(self.chosen))
        blocks = [
            block
            for block in self.blocks
            if not block.trouble
            and ((block.part == "plain" and not block.on) or (block.part == "plan" and block.on == plan_indices))
        ]
        pairs: list[tuple[MeasuredBlock, MeasuredBlock]] = []
        unpaired: MeasuredBlock | None = None
        for block in blocks:
            if (
                unpaired is None
                or unpaired.part == block.part
                or block.began - unpaired.began > _APART + unpaired.seconds
            ):
                unpaired = block  # the former block's other side was never measured, since the process ended
                continue
            pairs.append((unpaired, block) if unpaired.part == "plain" else (block, unpaired))
            unpaired = None
        return pairs

    def counted_pairs(self) -> list[tuple[MeasuredBlock, MeasuredBlock]]:
        """Return the pairs that make up the claim: the undisturbed ones, if there are at least three.

        Otherwise those of which both sides or neither were disturbed; if these are fewer than two, all pairs.
        """
        pairs = self.claim_pairs()
        quiet = [pair for pair in pairs if not (pair[0].disturbed or pair[1].disturbed)]
        if len(quiet) >= _LEAST_PAIRS:
            return quiet
        alike = [pair for pair in pairs if pair[0].disturbed == pair[1].disturbed]
        return alike if len(alike) > 1 else pairs

    def disturbed(self) -> float | None:
        """Return the share of the CPU that others took in the claim's blocks, from 0 to 1; None if undisturbed."""
        return mean_cpu_taken([side for pair in self.counted_pairs() for side in pair])

    def claim(self) -> Ratio | None:
        """Return the speed-up of a step under the plan, with its interval; None if it was not measured.

        With disturbed blocks the interval includes every pair: their disturbances may have a common cause, so that
        more pairs do not make the mean more certain.
        """
        logs = [math.log(plain.step_seconds / plan.step_seconds) for plain, plan in self.counted_pairs()]
        estimate = middle_of(logs)
        if estimate is None:
            return None
        middle, low, high = estimate
        if self.disturbed() is not None:
            low, high = min(low, *logs), max(high, *logs)
        return Ratio(*map(math.exp, (middle, low, high)))

    def claimed(self) -> Claim | None:
        """Return the claim, how it was measured, and how far others disturbed it; None if it was not measured."""
        if (speedup := self.claim()) is None:
            return None
        counted = len(self.counted_pairs())
        how = f"{counted} pairs of blocks in one process, the script as it is and the plan in turn"
        if left_out := len(self.claim_pairs()) - counted:
            how += f"; {left_out} more left out, which others disturbed"
        return Claim(speedup, how, self.disturbed())

    def phases(self) -> dict[str, tuple[float, ...]]:
        """Return the seconds of each phase of a step in the claim's median block, on both sides."""
        median_phases = {}
        for number, side in enumerate(("baseline", "plan")):
            blocks = [pair[number] for pair in self.counted_pairs()]
            if blocks:
                median_phases[side] = sorted(blocks, key=lambda block: block.step_seconds)[len(blocks) // 2].phases
        return median_phases


def mean_cpu_taken(measured: Sequence[MeasuredBlock | Trial]) -> float | None:
    """Return the mean share of the CPU that others took, from 0 to 1; None if none of these was disturbed."""
    if not any(block_or_trial.disturbed for block_or_trial in measured):
        return None
    return statistics.fmean(block_or_trial.taken or 0.0 for block_or_trial in measured)


class QuietMeter:
    """Measures how quiet the machine was since this object was created."""

    def __init__(self) -> None:
        self._reading = CpuReading()

    def noise(self, state: SearchState) -> MachineNoise:
        """Return the noise of the machine since creation, and the scatter of the blocks."""
        taken = self._reading.taken()
        return MachineNoise(taken.steal, taken.others, state.course.posterior.noise if state.blocks else None)
