"""An earlier tune's final estimates as this one's prior. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_DIGITS = 9  # behind the point: what a file needs
_LEAST = 1e-8  # more than rounding changes


@dataclass(frozen=True)
class Prior:
    """Effects of settings and pairs of them on log(seconds per step), and how they hang together.

    Two techniques that were never on without each other are known as a sum only: that is in the covariance.

    Attributes:
        rows: `Candidate.key` of each setting, then `pair_key` of each pair.
        mean: Of each row.
        covariance: Of the rows.
    """

    rows: tuple[str, ...]
    mean: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]

    def only(self, rows: Sequence[str]) -> Prior:
        """Return it with these rows."""
        at = [self.rows.index(row) for row in rows]
        covariance = tuple(tuple(self.covariance[i][j] for j in at) for i in at)
        return Prior(tuple(rows), tuple(self.mean[i] for i in at), covariance)

    def beside(self, other: Prior) -> Prior:
        """Return it with the rows of another that it lacks."""
        other = other.only([row for row in other.rows if row not in self.rows])
        mine, theirs = (0.0,) * len(self.rows), (0.0,) * len(other.rows)
        covariance = [*(line + theirs for line in self.covariance), *(mine + line for line in other.covariance)]
        return Prior(self.rows + other.rows, self.mean + other.mean, tuple(covariance))

    def widened(self, factor: float, least: float) -> Prior:
        """Return it with standard deviations so many times wider, `least` added to each before."""
        size, more = len(self.rows), least * least
        return Prior(
            self.rows,
            self.mean,
            tuple(
                tuple(factor * factor * (self.covariance[i][j] + (more if i == j else 0.0)) for j in range(size))
                for i in range(size)
            ),
        )

    def rounded(self) -> Prior:
        """Return it with figures as a file needs them."""
        covariance = tuple(tuple(round(value, _DIGITS) for value in line) for line in self.covariance)
        return Prior(self.rows, tuple(round(value, _DIGITS) for value in self.mean), covariance)

    def spread(self, row: int) -> float:
        """Standard deviation of a row."""
        return math.sqrt(max(0.0, self.covariance[row][row]))

    def is_sane(self, most: float) -> bool:
        """Whether it may come of a regression, its figures no larger than `most`."""
        size = len(self.rows)
        if not len(self.mean) == len(self.covariance) == size or any(len(line) != size for line in self.covariance):
            return False
        figures = [*self.mean, *(value for line in self.covariance for value in line)]
        return all(abs(value) <= most for value in figures) and _is_positive(self.covariance)


def pair_key(one: str, other: str) -> str:
    """Name a pair of settings."""
    return f"{one} & {other}"


def _is_positive(matrix: Sequence[Sequence[float]]) -> bool:
    """Whether a matrix is symmetric and positive definite, as far as rounding tells."""
    pairs = ((i, j) for i in range(len(matrix)) for j in range(i))
    return all(abs(matrix[i][j] - matrix[j][i]) <= _LEAST for i, j in pairs) and cholesky(matrix, _LEAST)[1] >= -_LEAST


def cholesky(matrix: Sequence[Sequence[float]], least: float) -> tuple[list[list[float]], float]:
    """Return the lower triangular factor of a covariance matrix, and its lowest pivot.

    Args:
        matrix: Symmetric; below its diagonal it is not read.
        least: What a lower pivot, which rounding may have made, is taken to be.
    """
    factor = [[0.0] * len(matrix) for _ in matrix]
    lowest = math.inf
    for i in range(len(matrix)):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(factor[i][k] * factor[j][k] for k in range(j))
            factor[i][j] = math.sqrt(max(rest, least)) if i == j else rest / factor[j][j]
        lowest = min(lowest, rest)
    return factor, lowest
