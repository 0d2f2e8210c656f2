"""The result of a check. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hasten.check import words
from hasten.check.agreement import Agreement
from hasten.check.judge import Compared, Difference
from hasten.plan import Setting


@dataclass(frozen=True)
class Checked:
    """The result of a check.

    Attributes:
        plan: The plan.
        runs: Its parts, from the strictest: what may change nothing, what may round, what may draw otherwise.
        culprits: Techniques that part from the plain run: one, or some that do so only together.
        files: What was saved otherwise: file and how.
        resumed: Where it was asked for: saved by the one, gone on with by the other.
        repeatable: Whether the plain run repeats itself to the bit; None where nobody had to know.
        notes: What else there is to say.
    """

    plan: Mapping[str, Setting]
    runs: tuple[Compared, ...] = ()
    culprits: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    resumed: tuple[tuple[str, Compared], ...] = ()
    repeatable: bool | None = None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool | None:
        """Whether the plan keeps its word; None where that could not be found out."""
        answers = [run.ok for run in (*self.runs, *(run for _, run in self.resumed))]
        if self.files or False in answers:
            return False
        return None if None in answers else True

    @property
    def first(self) -> Difference | None:
        """The first difference that matters."""
        parted = [run.first for run in (*self.runs, *(run for _, run in self.resumed)) if run.first and run.ok is False]
        if parted:
            return parted[0]
        return Difference("what was saved", self.files[0][0], self.files[0][1]) if self.files else None

    @property
    def agreed(self) -> Agreement | None:
        """How closely the run of the whole plan agrees; None for an empty plan, or where it parted before that."""
        return self.runs[-1].agreed if self.runs else None

    def __str__(self) -> str:
        """Say what was found, a line each."""
        lines = [words.answer(self), *words.reason(self)]
        lines += [f"{plan}: {outcome}" for plan, outcome, _ in words.runs(self)]
        return "\n".join([*lines, *words.remarks(self)])

    def as_json(self) -> dict[str, Any]:
        """Return this as plain values, with the answer and the first difference."""
        first = self.first
        return {"ok": self.ok, "first": None if first is None else asdict(first), **asdict(self)}
