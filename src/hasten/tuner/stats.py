"""The statistics behind a claim: bootstrap intervals of ratios, and the band of a few seeds."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence

from hasten.tuner.proof import Ratio
from hasten.tuner.timing import Timing

_RESAMPLES = 2000

# Two-sided 99 % points of Student's t for 1 to 10 degrees of freedom, then that of the normal distribution's tail.
_T99 = (63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169)


def ratio_of(
    pairs: Sequence[tuple[Timing, Timing]],
    value: Callable[[Timing, float], float] = lambda timing, step: timing.cost_of(step),
    confidence: float = 0.95,
) -> Ratio:
    """How many times less the second of each pair takes, with a bootstrap interval.

    Pairs are drawn again with replacement, and within each the blocks of steps, so the interval holds both how
    much processes differ and how much steps do.

    Args:
        pairs: (baseline, other) of trials measured one after the other.
        value: What is compared, given a timing and the seconds of a steady step.
        confidence: Of the interval.
    """
    draw = random.Random(0)

    def one(pair: tuple[Timing, Timing], resample: bool) -> float:
        sides = []
        for timing in pair:
            blocks = draw.choices(timing.blocks, k=len(timing.blocks)) if resample else timing.blocks
            sides.append(value(timing, statistics.median(blocks)))
        return math.log(sides[0] / sides[1])

    centre = statistics.median(one(pair, False) for pair in pairs)
    means = sorted(
        statistics.fmean(one(pair, True) for pair in draw.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES)
    )
    tail = (1 - confidence) / 2
    low, high = means[int(tail * _RESAMPLES)], means[min(_RESAMPLES - 1, int((1 - tail) * _RESAMPLES))]
    return Ratio(math.exp(centre), math.exp(min(low, centre)), math.exp(max(high, centre)), confidence)


def prediction_band(baseline: Sequence[float], others: int) -> tuple[float, float]:
    """Where the mean of `others` further runs lies with 99 % probability, if they are like the baseline's.

    Student's prediction interval: mean +- t * s * sqrt(1/n + 1/m), for values that are about normal.

    Args:
        baseline: One value a seed, at least two.
        others: How many further runs are averaged.
    """
    n = len(baseline)
    mean, spread = statistics.fmean(baseline), statistics.stdev(baseline)
    t = _T99[n - 2] if n - 2 < len(_T99) else 3.0
    half = t * spread * math.sqrt(1 / n + 1 / others)
    # Runs that agree to the last digits still differ by rounding, which is no change of the result.
    half = max(half, 1e-3 * abs(mean))
    return mean - half, mean + half
