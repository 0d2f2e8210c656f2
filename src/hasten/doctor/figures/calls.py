"""Calls of the loop that take time of their own on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hasten.doctor.rule import Rule
from hasten.evidence import Event, Evidence, Finding, HowKnown
from hasten.evidence.waiting import in_ms, per_step
from hasten.evidence.weigh import share_of, timed


def timed_calls(
    rule: type[Rule], evidence: Evidence, kind: str, what: Callable[[Event, str], str], fix: str
) -> Iterator[Finding | None]:
    """Yield a finding a line on calls whose time was measured.

    Args:
        rule: Whose finding it is.
        evidence: Of the run.
        kind: Of event, such as "gc_collect".
        what: Says what was seen, from the event and "12 times in 200 steps, 3.1 ms a step".
        fix: What to do.
    """
    for event in evidence.events_of(kind):
        spent = per_step(evidence, [event])
        often = f"{event.count} times in {evidence.steps} steps, {in_ms(spent)} a step"
        worth = share_of(evidence, spent)
        yield timed(rule.name, what(event, often), fix, worth, HowKnown.MEASURED, place=event.where)
