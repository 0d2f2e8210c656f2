"""What a search found: the blocks, what is known of each technique, and the claim."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from hasten.evidence.interval import middle_of
from hasten.plan import Setting
from hasten.tuner.proof import Ratio
from hasten.warm.course import Course
from hasten.warm.record import Measured

_APART = 15.0  # seconds between two sides of a pair, beyond which the machine may be another


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
        would_ask: What was left open for want of time, a sentence each.
    """

    course: Course
    warm: bool = True
    blocks: list[Measured] = field(default_factory=list)
    chosen: frozenset[int] = frozenset()
    compiling: float | None = None
    notes: list[str] = field(default_factory=list)
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

    def claim(self) -> Ratio | None:
        """How many times faster a step is under the plan, with its interval; None where that was not measured."""
        logs = [math.log(plain.step_seconds / plan.step_seconds) for plain, plan in self.sides()]
        found = middle_of(logs)
        return None if found is None else Ratio(*map(math.exp, found))

    def phases(self) -> dict[str, tuple[float, ...]]:
        """Seconds of each phase of a step in the claim's typical block, on both sides."""
        found = {}
        for number, side in enumerate(("baseline", "plan")):
            blocks = [pair[number] for pair in self.sides()]
            if blocks:
                found[side] = sorted(blocks, key=lambda one: one.step_seconds)[len(blocks) // 2].phases
        return found
