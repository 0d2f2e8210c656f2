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
        not_asked: Candidates that were not measured for lack of time -> reason.
        would_ask: What else was left open for lack of time, one sentence each.
    """

    course: Course
    warm: bool = True
    blocks: list[MeasuredBlock] = field(default_factory=list)
    chosen: frozenset[int] = frozenset()
    compiling: float | None = None
    notes: list[str] = field(default_factory=list)
    not_asked: dict[int, str] = field(default_factory=dict)
    would_ask: list[str] = field(default_factory=list)

    def plan(self) -> dict[str, Setting]:
        """Return the chosen techniques with their settings."""
        candidates = self.course.candidates
        return {candidates[i].name: candidates[i].setting for i in sorted(self.chosen)}

    def drop(self, names: Iterable[str], reason: str, lasting: bool = False) -> None:
        """Remove techniques from the plan. If `lasting`, the next tune of this training does not try them either."""
        gone = {i for i in self.chosen if self.course.candidates[i].name in set(names)}
        self.course.drop(gone, reason, lasting)
        self.chosen -= gone

    def sides(self) -> list[tuple[MeasuredBlock, MeasuredBlock]]:
        """Return the claim's pairs of blocks, (plain, plan), each measured one right after the other."""
        wanted = tuple(sorted(self.chosen))
        sides = [
            one
            for one in self.blocks
            if not one.trouble and ((one.part == "plain" and not one.on) or (one.part == "plan" and one.on == wanted))
        ]
        pairs: list[tuple[MeasuredBlock, MeasuredBlock]] = []
        waits: MeasuredBlock | None = None
        for one in sides:
            if waits is None or waits.part == one.part or one.began - waits.began > _APART + waits.seconds:
                waits = one  # the former block's other side was never measured, since the process ended
                continue
            pairs.append((waits, one) if waits.part == "plain" else (one, waits))
            waits = None
        return pairs

    def counted(self) -> list[tuple[MeasuredBlock, MeasuredBlock]]:
        """Return the pairs that make up the claim: the undisturbed ones, if there are at least three.

        Otherwise those of which both sides or neither were disturbed; if these are fewer than two, all pairs.
        """
        pairs = self.sides()
        quiet = [pair for pair in pairs if not (pair[0].disturbed or pair[1].disturbed)]
        if len(quiet) >= _LEAST_PAIRS:
            return quiet
        alike = [pair for pair in pairs if pair[0].disturbed == pair[1].disturbed]
        return alike if len(alike) > 1 else pairs

    def disturbed(self) -> float | None:
        """Return the share of the CPU that others took in the claim's blocks, from 0 to 1; None if undisturbed."""
        return taken_of([side for pair in self.counted() for side in pair])

    def claim(self) -> Ratio | None:
        """Return the speed-up of a step under the plan, with its interval; None if it was not measured.

        With disturbed blocks the interval includes every pair: their disturbances may have a common cause, so that
        more pairs do not make the mean more certain.
        """
        logs = [math.log(plain.step_seconds / plan.step_seconds) for plain, plan in self.counted()]
        found = middle_of(logs)
        if found is None:
            return None
        middle, low, high = found
        if self.disturbed() is not None:
            low, high = min(low, *logs), max(high, *logs)
        return Ratio(*map(math.exp, (middle, low, high)))

    def claimed(self) -> Claim | None:
        """Return the claim, how it was measured, and how far others disturbed it; None if it was not measured."""
        if (speedup := self.claim()) is None:
            return None
        counted = len(self.counted())
        how = f"{counted} pairs of blocks in one process, the script as it is and the plan in turn"
        if left := len(self.sides()) - counted:
            how += f"; {left} more left out, which others disturbed"
        return Claim(speedup, how, self.disturbed())

    def phases(self) -> dict[str, tuple[float, ...]]:
        """Return the seconds of each phase of a step in the claim's median block, on both sides."""
        found = {}
        for number, side in enumerate(("baseline", "plan")):
            blocks = [pair[number] for pair in self.counted()]
            if blocks:
                found[side] = sorted(blocks, key=lambda one: one.step_seconds)[len(blocks) // 2].phases
        return found


def taken_of(measured: Sequence[MeasuredBlock | Trial]) -> float | None:
    """Return the mean share of the CPU that others took, from 0 to 1; None if none of these was disturbed."""
    if not any(one.disturbed for one in measured):
        return None
    return statistics.fmean(one.taken or 0.0 for one in measured)


class QuietMeter:
    """Measures how quiet the machine was since this object was created."""

    def __init__(self) -> None:
        self._before = CpuReading()

    def noise(self, found: SearchState) -> MachineNoise:
        """Return the noise of the machine since creation, and the scatter of the blocks."""
        taken = self._before.taken()
        return MachineNoise(taken.steal, taken.others, found.course.posterior.noise if found.blocks else None)
