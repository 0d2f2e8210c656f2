"""Estimate the mean or the middle of a few independent values, with a 95 % confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 95 % points of Student's t for 1 to 12 degrees of freedom. The last one is used for more as well, where it
# makes the interval slightly too wide.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
_LEAST_RANKS = 6  # fewest values for which signed ranks give a 95 % interval


@dataclass(frozen=True)
class Estimate:
    """A mean and half the width of its 95 % interval."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.mean + self.half


def mean_of(values: Sequence[float]) -> Estimate | None:
    """Return the mean of independent values with Student's t interval; None for fewer than two."""
    if len(values) < 2:
        return None
    return Estimate(statistics.fmean(values), _t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values)))


def middle_of(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the middle of independent values and the ends of its 95 % interval; None for fewer than two.

    For six values or more this is the Hodges-Lehmann estimator: the median of the means of all pairs, with the interval
    of Wilcoxon's signed-rank test. So a single outlier (a step in which something was compiled) moves neither. For
    fewer values it is the mean, with Student's t interval.
    """
    if len(values) < _LEAST_RANKS:
        estimate = mean_of(values)
        return None if estimate is None else (estimate.mean, estimate.low, estimate.high)
    n = len(values)
    means = sorted((value + other) / 2 for i, value in enumerate(values) for other in values[i:])
    # Normal approximation of the signed-rank statistic: how many means lie below the interval.
    below = int(n * (n + 1) / 4 - 1.96 * math.sqrt(n * (n + 1) * (2 * n + 1) / 24))
    return statistics.median(means), means[below], means[-1 - below]


def _t95(freedom: int) -> float:
    return _T95[freedom - 1] if freedom <= len(_T95) else _T95[-1]
