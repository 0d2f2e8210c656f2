"""Counts of a run that a plan must leave as they are: batches of a pass, steps before a validation."""

from __future__ import annotations

from collections import Counter

from hasten.evidence import Evidence

Place = tuple[int, int]


def batches_of(evidence: Evidence) -> dict[Place, int]:
    """Return the batches of each complete pass that was trained on, by its loader and its number among the loader's.

    A pass is complete if another began behind its end; what was open when the trial ended was cut short.
    """
    last = max((over.start for over in evidence.passes), default=0.0)
    found: dict[Place, int] = {}
    of_loader: Counter[int] = Counter()
    for over in evidence.passes:
        if over.trained and over.batches and over.end <= last:
            found[over.loader, of_loader[over.loader]] = over.batches
            of_loader[over.loader] += 1
    return found


def steps_of(evidence: Evidence) -> dict[Place, int]:
    """Return the steps before each validation; where steps are batches, passes tell it better."""
    seen = evidence.validations if evidence.step_of == "optimizer" else ()
    return {(0, number): one.step for number, one in enumerate(seen)}
