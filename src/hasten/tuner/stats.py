"""Statistics behind a claim: bootstrap intervals of ratios, and intervals of means over a few runs or windows."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence

from hasten.evidence.interval import Estimate, mean_of, middle_of
from hasten.tuner.proof import Ratio
from hasten.tuner.timing import Timing

_RESAMPLES = 2000

_WINDOWS = (10, 5)


def ratio_of(
    pairs: Sequence[tuple[Timing, Timing]],
    value: Callable[[Timing, float], float] = lambda timing, step: timing.cost_of(step),
    confidence: float = 0.95,
) -> Ratio:
    """Return the ratio of the first to the second of each pair, with a bootstrap interval.

    Pairs are resampled with replacement, and blocks of steps within each pair, so the interval covers the differences
    between processes and those between steps.

    Args:
        pairs: (baseline, other) timings, measured one right after the other.
        value: Quantity to compare, given a timing and the seconds of a steady step.
        confidence: Coverage of the interval.
    """
    draw = random.Random(0)

    def log_ratio(pair: tuple[Timing, Timing], resample: bool) -> float:
        sides = []
        for timing in pair:
            blocks = draw.choices(timing.blocks, k=len(timing.blocks)) if resample else timing.blocks
            sides.append(value(timing, statistics.median(blocks)))
        return math.log(sides[0] / sides[1])

    centre = statistics.median(log_ratio(pair, False) for pair in pairs)
    means = sorted(
        statistics.fmean(log_ratio(pair, True) for pair in draw.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES)
    )
    tail = (1 - confidence) / 2
    low, high = means[int(tail * _RESAMPLES)], means[min(_RESAMPLES - 1, int((1 - tail) * _RESAMPLES))]
    return Ratio(math.exp(centre), math.exp(min(low, centre)), math.exp(max(high, centre)), confidence)


def steps_of(pairs: Sequence[tuple[Timing, Timing]]) -> Ratio:
    """Return the ratio of a steady step, first to second of each pair, with an interval for so few processes.

    Blocks of one process differ less than two processes of one script do, so the bootstrap of a few pairs is too
    narrow: of two equal processes it called one faster in 38 of 100 single pairs, and in 15 of 100 sets of three. So
    Student's interval over the pairs is used where it is wider; the interval of a single pair always includes 1.
    """
    bootstrap = ratio_of(pairs, lambda _, step: step)
    between = middle_of([math.log(baseline.step / plan.step) for baseline, plan in pairs])
    low, high = (1.0, 1.0) if between is None else (math.exp(between[1]), math.exp(between[2]))
    return Ratio(bootstrap.ratio, min(low, bootstrap.low), max(high, bootstrap.high), bootstrap.confidence)


def mean_of_course(values: Sequence[float]) -> Estimate | None:
    """Return the mean, with interval, of a series of autocorrelated values; None for fewer than ten.

    Uses batch means: windows that are long compared with the correlation are nearly independent of each other. That
    length is unknown, so ten windows and five of twice the length are tried, and the wider interval counts: values that
    are correlated over more than a window make the means of longer windows differ more.
    """
    estimates = [_by_windows(values, count) for count in _WINDOWS if len(values) >= _WINDOWS[0]]
    return Estimate(statistics.fmean(values), max(estimate.half for estimate in estimates)) if estimates else None


def _by_windows(values: Sequence[float], count: int) -> Estimate:
    length = len(values) // count
    skipped = len(values) - length * count  # the remainder is left out at the start of the series
    means = [statistics.fmean(values[start : start + length]) for start in range(skipped, len(values), length)]
    estimate = mean_of(means)
    assert estimate is not None
    return estimate


def mean_of_pairs(pairs: Sequence[Estimate]) -> Estimate:
    """Return the mean over pairs of runs, each with its own interval, and the wider of two intervals.

    One combines the intervals within the pairs. The other comes from the differences between the pairs: if the two runs
    of a pair drift apart early and stay apart, the series of that pair does not show it. From three pairs on it is
    Student's t; with two pairs, it spans both means.
    """
    means = [pair.mean for pair in pairs]
    within = math.sqrt(sum(pair.half**2 for pair in pairs)) / len(pairs)
    between = mean_of(means)
    if between is None:
        return Estimate(means[0], within)
    apart = between.half if len(pairs) > 2 else abs(means[0] - means[1]) / 2
    return Estimate(between.mean, max(within, apart))
