"""The result of a search: the blocks, what is known of each technique, and the claim."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hasten.evidence.interval import middle_of
from hasten.online.course import Course
from hasten.online.cpu_contention import Reading
from hasten.online.record import Measured
from hasten.plan import Setting
from hasten.tuner.proof import MachineNoise, Ratio
from hasten.tuner.trial import Trial

_APART = 15.0  # seconds between two sides of a pair, beyond which the machine may be another
_LEAST_PAIRS = 3  # that nobody disturbed, or a claim is of disturbed ones too, and says so


@dataclass(frozen=True)
class Claimed:
    """A claim about a plan.

    Attributes:
        speedup: How many times faster it is.
        how: How that was measured, in words.
        disturbed: Share of the CPU that others took meanwhile, from 0 to 1; None where they disturbed nothing.
    """

    speedup: Ratio
    how: str
    disturbed: float | None = None


@dataclass
class Found:
    """A search as far as it went.

    Attributes:
        course: What is known of each candidate.
        warm: Whether it was measured in one process.
        blocks: All blocks, also those that do not count.
        chosen: Indices of the plan's candidates.
        compiling: Seconds that compiling took; None where it was not tried.
        notes: Faults, stops and the like, a sentence each.
        not_asked: Indices of candidates for which no time was left -> what they would have taken.
        would_ask: What else was left open for want of time, a sentence each.
    """

    course: Course
    warm: bool = True
    blocks: list[Measured] = field(default_factory=list)
    chosen: frozenset[int] = frozenset()
    compiling: float | None = None
    notes: list[str] = field(default_factory=list)
    not_asked: dict[int, str] = field(default_factory=dict)
    would_ask: list[str] = field(default_factory=list)

    def plan(self) -> dict[str, Setting]:
        """The chosen techniques with their settings."""
        candidates = self.course.candidates
        return {candidates[i].name: candidates[i].setting for i in sorted(self.chosen)}

    def drop(self, names: Iterable[str], reason: str, lasting: bool = False) -> None:
        """Take techniques out of the plan; where `lasting`, the next tune of this training does not ask them either."""
        gone = {i for i in self.chosen if self.course.candidates[i].name in set(names)}
        self.course.drop(gone, reason, lasting)
        self.chosen -= gone

    def sides(self) -> list[tuple[Measured, Measured]]:
        """The claim's pairs of blocks, plain and plan, as they were measured one after the other."""
        wanted = tuple(sorted(self.chosen))
        sides = [
            one
            for one in self.blocks
            if not one.trouble and ((one.part == "plain" and not one.on) or (one.part == "plan" and one.on == wanted))
        ]
        pairs: list[tuple[Measured, Measured]] = []
        waits: Measured | None = None
        for one in sides:
            if waits is None or waits.part == one.part or one.began - waits.began > _APART + waits.seconds:
                waits = one  # its other side was never measured: the process ended
                continue
            pairs.append((waits, one) if waits.part == "plain" else (one, waits))
            waits = None
        return pairs

    def counted(self) -> list[tuple[Measured, Measured]]:
        """The pairs that the claim is of: those that nobody disturbed.

        Where these are fewer than three, those of which both sides were disturbed, or neither; where these are fewer
        than two, all.
        """
        pairs = self.sides()
        quiet = [pair for pair in pairs if not (pair[0].disturbed or pair[1].disturbed)]
        if len(quiet) >= _LEAST_PAIRS:
            return quiet
        alike = [pair for pair in pairs if pair[0].disturbed == pair[1].disturbed]
        return alike if len(alike) > 1 else pairs

    def disturbed(self) -> float | None:
        """Share of the CPU that others took in the claim's blocks, from 0 to 1; None where nobody disturbed them."""
        return taken_of([side for pair in self.counted() for side in pair])

    def claim(self) -> Ratio | None:
        """How many times faster a step is under the plan, with its interval; None where that was not measured.

        The interval of a claim of disturbed blocks holds each of its pairs: what they have in common may be due to
        others, so that their number makes nothing surer.
        """
        logs = [math.log(plain.step_seconds / plan.step_seconds) for plain, plan in self.counted()]
        found = middle_of(logs)
        if found is None:
            return None
        middle, low, high = found
        if self.disturbed() is not None:
            low, high = min(low, *logs), max(high, *logs)
        return Ratio(*map(math.exp, (middle, low, high)))

    def claimed(self) -> Claimed | None:
        """The claim, how it was measured and what others took meanwhile; None where it was not measured."""
        if (speedup := self.claim()) is None:
            return None
        counted = len(self.counted())
        how = f"{counted} pairs of blocks in one process, the script as it is and the plan in turn"
        if left := len(self.sides()) - counted:
            how += f"; {left} more left out, which others disturbed"
        return Claimed(speedup, how, self.disturbed())

    def phases(self) -> dict[str, tuple[float, ...]]:
        """Seconds of each phase of a step in the claim's typical block, on both sides."""
        found = {}
        for number, side in enumerate(("baseline", "plan")):
            blocks = [pair[number] for pair in self.counted()]
            if blocks:
                found[side] = sorted(blocks, key=lambda one: one.step_seconds)[len(blocks) // 2].phases
        return found


def taken_of(measured: Sequence[Measured | Trial]) -> float | None:
    """Mean share of the CPU that others took, from 0 to 1; None where nothing of this was disturbed by that."""
    if not any(one.disturbed for one in measured):
        return None
    return statistics.fmean(one.taken or 0.0 for one in measured)


class Quiet:
    """How quiet the machine is: reads CPU times when made, and again when asked."""

    def __init__(self) -> None:
        self._before = Reading()

    def noise(self, found: Found) -> MachineNoise:
        """What was seen since."""
        taken = self._before.taken()
        return MachineNoise(taken.steal, taken.others, found.course.posterior.noise if found.blocks else None)
