"""Finding: what a technique or check says about evidence or source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How much a finding matters, the worst first: from its worth in time, or from what it may do to the result."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"
    NOTE = "note"


_ORDER = tuple(Severity)


def or_worse(severity: str) -> tuple[Severity, ...]:
    """The severities that matter as much as this one, or more: what `--fail-on` names."""
    return _ORDER[: _ORDER.index(Severity(severity)) + 1]


class HowKnown(StrEnum):
    """Where a worth comes from.

    `measured`: this time was seen to be spent on it, or the change was tried here. `estimated`: worked out from what
    was measured. `read`: read from code; nothing was run.
    """

    MEASURED = "measured"
    ESTIMATED = "estimated"
    READ = "read"


def severity_of(worth: float | None) -> Severity:
    """Severity by the share of the steady step that may be saved: 20 % high, 5 % medium, 1 % low, else a note."""
    if worth is None or worth < 0.01:
        return Severity.NOTE
    return Severity.HIGH if worth >= 0.20 else Severity.MEDIUM if worth >= 0.05 else Severity.LOW


@dataclass(frozen=True)
class Finding:
    """One problem: what, where, what it may be worth, and what to do.

    Attributes:
        name: Of the rule, as in `# hasten: ignore[name]`: "workers_zero".
        what: One sentence with the figures it rests on, no full stop: "the step waits 61 % of its time for data".
        fix: What to do, as an instruction: "give the loader num_workers=2, persistent_workers=True".
        severity: From `severity_of(worth)`, unless it touches the result itself.
        worth: Share of the steady step's time that may be saved, 0 to 1; None where it is not about time.
        how_known: Where `worth` comes from.
        file, line: The script's place, "" and 0 where there is none (then `where` may name a module path).
        where: Module path ("layer1.0.conv1") or another place that is not a line.
        details: Further figures, a line each.
        technique: The technique that brings the cure, "" if none; `setting` as it would stand in a plan.
        sources: Guide or paper.
    """

    name: str
    what: str
    fix: str
    severity: Severity
    worth: float | None = None
    how_known: HowKnown = HowKnown.ESTIMATED
    file: str = ""
    line: int = 0
    where: str = ""
    details: tuple[str, ...] = ()
    technique: str = ""
    setting: str = ""
    sources: tuple[str, ...] = ()


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings by severity, then by worth, then by name."""
    return sorted(findings, key=lambda one: (_ORDER.index(one.severity), -(one.worth or 0.0), one.name))


def split_place(where: str) -> tuple[str, int]:
    """`file:line` as (file, line); ("", 0) where it is none.

    >>> split_place("/home/me/train.py:12")
    ('/home/me/train.py', 12)
    """
    file, _, line = where.rpartition(":")
    return (file, int(line)) if file and line.isdecimal() else ("", 0)
