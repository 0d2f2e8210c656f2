"""Events in which the CPU waits for the GPU, by line."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.doctor.rule import Rule
from hasten.evidence import Event, Evidence, Finding, HowKnown, Severity, split_place
from hasten.evidence.waiting import per_step, worth_of_waits
from hasten.evidence.weigh import LEAST, share_of, timed


def by_line(events: list[Event]) -> list[list[Event]]:
    """Events of the same line together, the costliest line first."""
    lines: dict[str, list[Event]] = {}
    for event in events:
        lines.setdefault(event.where, []).append(event)
    return list(lines.values())


def wait_finding(
    rule: type[Rule], evidence: Evidence, events: list[Event], what: str, fix: str, details: tuple[str, ...] = ()
) -> Iterator[Finding | None]:
    """A finding on events of one line in which the CPU waits for the GPU."""
    worth, spent = worth_of_waits(evidence, events), per_step(evidence, events)
    where = events[0].where
    if worth is not None:
        yield timed(rule.name, what, fix, worth, HowKnown.ESTIMATED, place=where, details=details)
    elif share_of(evidence, spent) >= LEAST:
        file, line = split_place(where)
        unknown = "what it costs depends on how busy the GPU is meanwhile, which is not known here"
        yield Finding(
            rule.name, what, fix, Severity.NOTE, None, HowKnown.ESTIMATED, file, line, "", (*details, unknown),
        )  # fmt: skip
