"""The mean of a few values that do not depend on each other, and its interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 95 % points of Student's t for 1 to 12 degrees of freedom; for more the last one, which is too wide.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
_LEAST_RANKS = 6  # values, below which signed ranks give no interval of 95 %


@dataclass(frozen=True)
class Estimate:
    """A mean and half of the width of its 95 % interval."""

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
    """Return the middle of independent values with its 95 % interval; None for fewer than two.

    From six values on by Hodges and Lehmann: the median of the means of all pairs, with the interval that Wilcoxon's
    signed ranks give, so that one value far off (a step in which something was compiled) moves neither. Of fewer, the
    mean with Student's t.
    """
    if len(values) < _LEAST_RANKS:
        found = mean_of(values)
        return None if found is None else (found.mean, found.low, found.high)
    n = len(values)
    means = sorted((one + other) / 2 for i, one in enumerate(values) for other in values[i:])
    below = int(n * (n + 1) / 4 - 1.96 * math.sqrt(n * (n + 1) * (2 * n + 1) / 24))
    return statistics.median(means), means[below], means[-1 - below]


def _t95(freedom: int) -> float:
    return _T95[freedom - 1] if freedom <= len(_T95) else _T95[-1]
