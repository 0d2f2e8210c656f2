"""The mean of a few values that do not depend on each other, and its interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 95 % points of Student's t for 1 to 12 degrees of freedom; for more the last one, which is too wide.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


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


def _t95(freedom: int) -> float:
    return _T95[freedom - 1] if freedom <= len(_T95) else _T95[-1]
