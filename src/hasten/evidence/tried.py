"""Techniques that were switched on and off in a training that ran."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TriedLive:
    """A technique switched on and off in the training while it ran: blocks of steps with and without it, in turn.

    Attributes:
        finding: Name of the rule whose cure it is ("full_precision").
        technique: The technique.
        setting: Its setting, as in a plan ("bf16-mixed").
        besides: What else was switched with it, since the cure says so: lines of a plan.
        ratio: How many times less a step takes with it: geometric mean of the pairs of neighbouring blocks.
        low, high: 95 % interval of that (Student's t over the pairs).
        blocks: How many there were on each side.
        steps: How many steps they had on each side, on average.
        before: Mean seconds of a step without it; validation and checkpoints are left out.
        failed: Why it could not be measured, or "".
    """

    finding: str
    technique: str
    setting: str
    besides: tuple[str, ...] = ()
    ratio: float = 1.0
    low: float = 0.0
    high: float = 0.0
    blocks: int = 0
    steps: float = 0.0
    before: float = 0.0
    failed: str = ""

    @property
    def saved(self) -> float:
        """Share of the step that it saves, below 0 where a step takes longer."""
        return 1 - 1 / self.ratio if self.ratio > 0 else 0.0
