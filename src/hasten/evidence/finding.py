"""Finding: a problem that a rule finds in evidence or source code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How much a finding matters, worst first: by the time it may save, or by its effect on the training's result."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"
    NOTE = "note"


_ORDER = tuple(Severity)


def or_worse(severity: str) -> tuple[Severity, ...]:
    """Return this severity and all worse ones, for `--fail-on`."""
    return _ORDER[: _ORDER.index(Severity(severity)) + 1]


class HowKnown(StrEnum):
    """How a finding's worth is known.

    `measured`: this time was observed to be spent on it, or the change was tried here. `estimated`: calculated from
    measurements. `read`: read from code; nothing was run.
    """

    MEASURED = "measured"
    ESTIMATED = "estimated"
    READ = "read"


def severity_of(worth: float | None) -> Severity:
    """Return the severity by the share of the steady step that may be saved: 20 % high, 5 % medium, 1 % low."""
    if worth is None or worth < 0.01:
        return Severity.NOTE
    return Severity.HIGH if worth >= 0.20 else Severity.MEDIUM if worth >= 0.05 else Severity.LOW


@dataclass(frozen=True)
class Finding:
    """One problem: what it is, where, how much fixing it may save, and what to do.

    Attributes:
        name: Name of the rule, as in `# hasten: ignore[name]`: "workers_zero".
        what: One sentence with the figures it is based on, no full stop: "the step waits 61 % of its time for data".
        fix: What to do, as an instruction: "give the loader num_workers=2, persistent_workers=True".
        severity: From `severity_of(worth)`, unless the problem affects the training's result itself.
        worth: Share of the steady step's time that may be saved, 0 to 1; None if the problem is not about time.
        how_known: How `worth` is known.
        file: The script's file; "" if there is none (then `where` may name a module path).
        line: The line in that file; 0 if there is none.
        where: Module path ("layer1.0.conv1") or another place that is not a line.
        details: Further figures, one line each.
        technique: The technique that is the cure; "" if none.
        setting: The technique's setting, as written in a plan.
        sources: Guides or papers.
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
    return sorted(findings, key=lambda finding: (_ORDER.index(finding.severity), -(finding.worth or 0.0), finding.name))


def split_place(where: str) -> tuple[str, int]:
    """Split `file:line` into (file, line); return ("", 0) for any other text.

    >>> split_place("/home/me/train.py:12")
    ('/home/me/train.py', 12)
    """
    file, _, line = where.rpartition(":")
    return (file, int(line)) if file and line.isdecimal() else ("", 0)
