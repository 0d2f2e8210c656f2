"""An earlier tune's final estimates as this one's prior. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_DIGITS = 9  # decimals in a file
_LEAST = 1e-8  # tolerance: more than `_DIGITS` rounds away


@dataclass(frozen=True)
class Prior:
    """Joint estimate of the effects of settings and pairs on log(seconds per step).

    The covariance matters: of two techniques that were always on together only the sum of their effects is known.

    Attributes:
        rows: `Candidate.key` of each setting, then `pair_key` of each pair.
        mean: Mean effect of each row.
        covariance: Covariance of the rows' effects.
    """

    rows: tuple[str, ...]
    mean: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]

    def only(self, rows: Sequence[str]) -> Prior:
        """Return the estimate of these rows alone, in this order."""
        indices = [self.rows.index(row) for row in rows]
        covariance = tuple(tuple(self.covariance[i][j] for j in indices) for i in indices)
        return Prior(tuple(rows), tuple(self.mean[i] for i in indices), covariance)

    def beside(self, other: Prior) -> Prior:
        """Return this estimate, extended by the rows that only `other` has, as independent of these."""
        other = other.only([row for row in other.rows if row not in self.rows])
        zeros, other_zeros = (0.0,) * len(self.rows), (0.0,) * len(other.rows)
        covariance = [*(row + other_zeros for row in self.covariance), *(zeros + row for row in other.covariance)]
        return Prior(self.rows + other.rows, self.mean + other.mean, tuple(covariance))

    def widened(self, factor: float, least: float) -> Prior:
        """Return this estimate with `least` added in quadrature to each standard deviation, and that times `factor`."""
        size, added = len(self.rows), least * least
        return Prior(
            self.rows,
            self.mean,
            tuple(
                tuple(factor * factor * (self.covariance[i][j] + (added if i == j else 0.0)) for j in range(size))
                for i in range(size)
            ),
        )

    def rounded(self) -> Prior:
        """Return this estimate rounded to the decimals that are written to files."""
        covariance = tuple(tuple(round(value, _DIGITS) for value in row) for row in self.covariance)
        return Prior(self.rows, tuple(round(value, _DIGITS) for value in self.mean), covariance)

    def spread(self, row: int) -> float:
        """Return the standard deviation of a row's effect."""
        return math.sqrt(max(0.0, self.covariance[row][row]))

    def is_sane(self, most: float) -> bool:
        """Return whether this is a valid estimate: shapes agree, no figure exceeds `most`, the covariance is one."""
        size = len(self.rows)
        if not len(self.mean) == len(self.covariance) == size or any(len(row) != size for row in self.covariance):
            return False
        figures = [*self.mean, *(value for row in self.covariance for value in row)]
        return all(abs(value) <= most for value in figures) and _is_positive(self.covariance)


def pair_key(first: str, second: str) -> str:
    """Return the name of a pair of settings."""
    return f"{first} & {second}"


def _is_positive(matrix: Sequence[Sequence[float]]) -> bool:
    """Return whether a matrix is symmetric and positive semidefinite, within rounding."""
    pairs = ((i, j) for i in range(len(matrix)) for j in range(i))
    return all(abs(matrix[i][j] - matrix[j][i]) <= _LEAST for i, j in pairs) and cholesky(matrix, _LEAST)[1] >= -_LEAST


def cholesky(matrix: Sequence[Sequence[float]], least: float) -> tuple[list[list[float]], float]:
    """Return the lower triangular factor of a covariance matrix, and its lowest pivot.

    Args:
        matrix: A symmetric matrix; only its lower triangle is read.
        least: Lower bound of the pivots: rounding can make one zero or negative.
    """
    factor = [[0.0] * len(matrix) for _ in matrix]
    lowest = math.inf
    for i in range(len(matrix)):
        for j in range(i + 1):
            remainder = matrix[i][j] - sum(factor[i][k] * factor[j][k] for k in range(j))
            factor[i][j] = math.sqrt(max(remainder, least)) if i == j else remainder / factor[j][j]
        lowest = min(lowest, remainder)
    return factor, lowest
