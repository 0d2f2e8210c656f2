"""The result of a check. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hasten.check import words
from hasten.check.agreement import Agreement
from hasten.check.judge import Difference, RunComparison
from hasten.plan import Setting


@dataclass(frozen=True)
class CheckResult:
    """The result of a check.

    Attributes:
        plan: The plan.
        runs: Comparisons of its parts, the strictest first: exact techniques, with rounding ones, with sampling ones.
        culprits: Techniques that cause a difference: one, or several that do so only together.
        files: Saved files that differ: (file, how).
        resumed: Comparisons after a resume, if asked for: (which side saved and which resumed, comparison).
        repeatable: Whether the plain run repeats itself to the bit; None if that was not needed.
        notes: Further remarks.
    """

    plan: Mapping[str, Setting]
    runs: tuple[RunComparison, ...] = ()
    culprits: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    resumed: tuple[tuple[str, RunComparison], ...] = ()
    repeatable: bool | None = None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool | None:
        """Whether the plan changes no more than its techniques may; None if that could not be found out."""
        answers = [run.ok for run in (*self.runs, *(run for _, run in self.resumed))]
        if self.files or False in answers:
            return False
        return None if None in answers else True

    @property
    def first(self) -> Difference | None:
        """The first difference that refutes the plan; None if there is none."""
        parted = [run.first for run in (*self.runs, *(run for _, run in self.resumed)) if run.first and run.ok is False]
        if parted:
            return parted[0]
        return Difference("what was saved", self.files[0][0], self.files[0][1]) if self.files else None

    @property
    def agreed(self) -> Agreement | None:
        """Agreement of the whole plan's run; None for an empty plan, or if the run ended at a difference before."""
        return self.runs[-1].agreed if self.runs else None

    def __str__(self) -> str:
        """Return the answer, its reason, the comparisons and remarks, one per line."""
        lines = [words.answer(self), *words.reason(self)]
        lines += [f"{plan}: {outcome}" for plan, outcome, _ in words.runs(self)]
        return "\n".join([*lines, *words.remarks(self)])

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain values, including the answer and the first difference."""
        first = self.first
        return {"ok": self.ok, "first": None if first is None else asdict(first), **asdict(self)}
