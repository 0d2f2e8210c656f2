"""The statistics behind a claim: bootstrap intervals of ratios, and intervals of means of a few runs or windows."""

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


def steps_of(pairs: Sequence[tuple[Timing, Timing]]) -> Ratio:
    """How many times less a steady step of the second of each pair takes, as far as so many processes can tell.

    Blocks of one process lie closer together than two processes of one script do, and the bootstrap of few pairs is too
    narrow: of two processes alike it called one faster in 38 of 100 single pairs, and in 15 of 100 times three. So the
    interval is Student's over the pairs where that is wider; that of a single pair, which tells nothing of it, holds 1.
    """
    found = ratio_of(pairs, lambda _, step: step)
    between = middle_of([math.log(one.step / other.step) for one, other in pairs])
    low, high = (1.0, 1.0) if between is None else (math.exp(between[1]), math.exp(between[2]))
    return Ratio(found.ratio, min(low, found.low), max(high, found.high), found.confidence)


def mean_of_course(values: Sequence[float]) -> Estimate | None:
    """Return the mean of a course of values, each of which may depend on those before it; None for fewer than ten.

    By batch means: windows that are long beside the dependence are about independent of each other. Nobody knows
    how long that is, so ten windows and five of twice the length are tried, and the wider interval counts: where
    values depend on each other over longer than a window, the means of long windows differ more than chance has it.
    """
    estimates = [_by_windows(values, count) for count in _WINDOWS if len(values) >= _WINDOWS[0]]
    return Estimate(statistics.fmean(values), max(one.half for one in estimates)) if estimates else None


def _by_windows(values: Sequence[float], count: int) -> Estimate:
    length = len(values) // count
    first = len(values) - length * count  # what is left over is left out where the course begins
    means = [statistics.fmean(values[at : at + length]) for at in range(first, len(values), length)]
    estimate = mean_of(means)
    assert estimate is not None
    return estimate


def mean_of_pairs(pairs: Sequence[Estimate]) -> Estimate:
    """Return the mean of what several pairs of runs show, each with its own interval: the more careful of two.

    One interval is put together from those within the pairs. The other comes from how much the pairs differ: what
    stays different through the whole of a pair, since its two runs drifted apart early on, no course of one pair
    shows. Three pairs or more give it by Student's t; of two, both must lie in the interval.
    """
    means = [pair.mean for pair in pairs]
    within = math.sqrt(sum(pair.half**2 for pair in pairs)) / len(pairs)
    between = mean_of(means)
    if between is None:
        return Estimate(means[0], within)
    apart = between.half if len(pairs) > 2 else abs(means[0] - means[1]) / 2
    return Estimate(between.mean, max(within, apart))
