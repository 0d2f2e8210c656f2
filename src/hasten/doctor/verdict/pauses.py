"""What is not a steady step: start-up, the first step, epoch starts, outliers, and a trend."""

from __future__ import annotations

import math
import statistics

from hasten.doctor.verdict.diagnosis import Pauses
from hasten.evidence import Evidence

_OUTLIER = 3.0  # times the median
_MOST = 20
_FOR_A_TREND = 20  # steady steps


def pauses(evidence: Evidence) -> Pauses:
    """The pauses of a run; without steps only what can be told of its start."""
    lengths = evidence.step_seconds
    if not lengths:
        return Pauses()
    from_the_start = evidence.number(0) == 0  # a live file holds the last steps only
    began = min([0.0, *evidence.used.at[:1]])
    return Pauses(
        start_up=evidence.step_start[0] - began if from_the_start else math.nan,
        first_step=lengths[0] if from_the_start else math.nan,
        epoch_starts=tuple(over.first - over.start for over in evidence.passes if over.trained),
        outliers=_outliers(evidence, lengths),
        trend=_trend([lengths[index] for index in evidence.steady()]),
    )


def _outliers(evidence: Evidence, lengths: list[float]) -> tuple[tuple[int, float], ...]:
    steady = evidence.steady()
    if not steady:
        return ()
    bound = _OUTLIER * statistics.median(lengths[index] for index in steady)
    disturbed = set(evidence.disturbed)
    long = [
        (evidence.number(index), lengths[index])
        for index in range(1, len(lengths))
        if lengths[index] > bound > 0 and evidence.number(index) not in disturbed
    ]
    return tuple(sorted(sorted(long, key=lambda one: -one[1])[:_MOST]))


def _trend(steady: list[float]) -> float:
    if len(steady) < _FOR_A_TREND:
        return 0.0
    quarter = len(steady) // 4
    first, last = statistics.median(steady[:quarter]), statistics.median(steady[-quarter:])
    trend = last / first - 1 if first > 0 else 0.0
    return trend if math.isfinite(trend) else 0.0
