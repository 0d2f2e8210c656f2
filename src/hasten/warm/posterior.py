"""What blocks tell of each technique: a Bayesian regression of log(seconds per step), one block at a time. No torch.

log(seconds per step) = level + sum of the effects of what is on + what known pairs do together + noise. The level
drifts (the machine is shared, the training goes on); effects stay. Everything is normal, so one block is one step of a
Kalman filter. A block far off what is expected is pulled in, so that a hiccup of the machine decides nothing. Blocks
that others disturbed (see `taken.py`) are slower by something that they have in common, and count for a ninth.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

_DRIFT = 0.15  # of the noise: how far the level walks between two blocks
_LEAST_NOISE = 0.01
_FIRST_NOISE = 0.06
_ENOUGH = 6  # blocks that tell the noise
_PULL = 3.0  # standard deviations beyond which a block counts no further
_RESTART = 0.15  # how much the level may change from one process to the next
_DISTURBED = (0.2, 0.5)  # how much slower steps are while others take of the CPU: mean and deviation
_LESS_SURE = 3.0  # times as far as a quiet block may a disturbed one be off


@dataclass(frozen=True)
class CandidateEstimate:
    """What is known of one candidate.

    Attributes:
        mean: Change of log(seconds per step) when it is on; negative is faster.
        spread: Standard deviation.
        blocks: Blocks in which it was on.
        without: Blocks in which it was off.
    """

    mean: float
    spread: float
    blocks: int
    without: int

    @property
    def helps(self) -> float:
        """Probability that it makes a step faster."""
        return 0.5 * math.erfc(self.mean / (self.spread * math.sqrt(2)))

    @property
    def ratio(self) -> tuple[float, float, float]:
        """How many times faster a step is with it: the middle and the 95 % interval."""
        half = 1.96 * self.spread
        return math.exp(-self.mean), math.exp(-self.mean - half), math.exp(-self.mean + half)


@dataclass(frozen=True)
class Seen:
    """A block that was measured: what was on, log(seconds per step), its process, and whether others disturbed it."""

    on: frozenset[int]
    pace: float
    process: int = 0
    disturbed: bool = False


class Posterior:
    """What is known of every candidate's effect.

    Args:
        priors: (mean, spread) of each candidate's effect before anything was measured.
        pairs: Two candidates that may change each other's worth -> (mean, spread) of what they do together beyond
            what each does alone.
        shared: Covariance of two of these effects (candidates, then pairs) before anything was measured.
    """

    def __init__(
        self,
        priors: Sequence[tuple[float, float]],
        pairs: Mapping[tuple[int, int], tuple[float, float]] = MappingProxyType({}),
        shared: Mapping[tuple[int, int], float] = MappingProxyType({}),
    ) -> None:
        self.priors = list(priors)
        self.pairs = dict(pairs)
        self._shared = dict(shared)
        self.seen: list[Seen] = []
        self.noise = _FIRST_NOISE
        self._mean: list[float] = []
        self._cov: list[list[float]] = []
        self._fit(self.noise)

    def add(self, on: Collection[int], seconds: float, process: int = 0, disturbed: bool = False) -> None:
        """A block was measured."""
        self.seen.append(Seen(frozenset(on), math.log(seconds), process, disturbed))
        residuals = self._fit(self.noise)
        quiet = [residual for residual, block in zip(residuals, self.seen[1:], strict=True) if not block.disturbed]
        residuals = quiet if len(quiet) >= _ENOUGH else residuals
        if len(residuals) >= _ENOUGH:
            # The median is not moved by hiccups; 1.48 times it is a normal distribution's standard deviation.
            self.noise = max(_LEAST_NOISE, 1.48 * statistics.median(map(abs, residuals)))
        self._fit(self.noise)

    def estimate(self, index: int, beside: Collection[int]) -> CandidateEstimate:
        """What is known of a candidate, with these others on."""
        rows = [1 + index, *self._rows_of_pairs(index, beside)]
        variance = sum(self._cov[i][j] for i in rows for j in rows)
        return CandidateEstimate(
            sum(self._mean[i] for i in rows),
            math.sqrt(max(1e-12, variance)),
            sum(index in block.on for block in self.seen),
            sum(index not in block.on for block in self.seen),
        )

    def asked(self, index: int) -> float:
        """Blocks in which a candidate was on, or off if these are fewer; three disturbed ones count as one."""
        weights = [(index in block.on, 1 / _LESS_SURE if block.disturbed else 1.0) for block in self.seen]
        return min(sum(weight for on, weight in weights if on is side) for side in (True, False))

    def gain(self, on: Collection[int]) -> tuple[float, float]:
        """Mean and standard deviation of the change of log(seconds per step) with these on."""
        rows = self._rows(on)[1:]
        variance = sum(self._cov[i][j] for i in rows for j in rows)
        return sum(self._mean[i] for i in rows), math.sqrt(max(0.0, variance))

    def better(self, on: Collection[int], than: Collection[int]) -> float:
        """Probability that steps are faster with these on than with those, which are among them."""
        rows = set(self._rows(on)) - set(self._rows(than))
        mean = sum(self._mean[i] for i in rows)
        spread = math.sqrt(max(1e-12, sum(self._cov[i][j] for i in rows for j in rows)))
        return 0.5 * math.erfc(mean / (spread * math.sqrt(2)))

    def means(self) -> list[float]:
        """Expected effects of the candidates, then of the pairs."""
        return self._mean[1:-1]

    def covariance(self) -> list[list[float]]:
        """Covariance of the effects of the candidates, then of the pairs."""
        return [row[1:-1] for row in self._cov[1:-1]]

    @property
    def level(self) -> float:
        """Expected log(seconds per step) of a block now, with nothing on."""
        return self._mean[0]

    def draw(self, lot: random.Random) -> list[float]:
        """Draw the effects of all candidates and pairs at once, as likely as they are."""
        factor = _cholesky(self._cov)
        normal = [lot.gauss(0.0, 1.0) for _ in self._mean]
        return [self._mean[i] + sum(factor[i][j] * normal[j] for j in range(i + 1)) for i in range(1, len(factor) - 1)]

    def _fit(self, noise: float) -> list[float]:
        """Run the filter over all blocks; what it did not expect of each, in units of log(seconds)."""
        priors = [(self.seen[0].pace if self.seen else 0.0, 1.0), *self.priors, *self.pairs.values(), _DISTURBED]
        self._mean = [mean for mean, _ in priors]
        self._cov = [[0.0] * len(priors) for _ in priors]
        for i, (_, spread) in enumerate(priors):
            self._cov[i][i] = spread * spread
        for (i, j), covariance in self._shared.items():
            self._cov[1 + i][1 + j] = covariance
        residuals = []
        # Where others disturb all the time, there is nothing better to go by: the noise is that of disturbed blocks.
        known = len(self.seen) > _ENOUGH and all(block.disturbed for block in self.seen)
        less_sure = 1.0 if known else _LESS_SURE
        process = self.seen[0].process if self.seen else 0
        for block in self.seen:
            self._cov[0][0] += (_DRIFT * noise) ** 2
            if block.process != process:
                process = block.process
                self._cov[0][0] += _RESTART**2
            residuals.append(self._step(block, noise, less_sure if block.disturbed else 1.0))
        return residuals[1:]

    def _rows(self, on: Collection[int]) -> list[int]:
        """What acts in a block with these on: the level, the candidates, the pairs of which both are on."""
        first = 1 + len(self.priors)
        together = (first + place for place, (one, other) in enumerate(self.pairs) if one in on and other in on)
        return [0, *(1 + i for i in on), *together]

    def _rows_of_pairs(self, index: int, beside: Collection[int]) -> list[int]:
        first = 1 + len(self.priors)
        return [
            first + place
            for place, (one, other) in enumerate(self.pairs)
            if (one == index and other in beside) or (other == index and one in beside)
        ]

    def _step(self, block: Seen, noise: float, less_sure: float) -> float:
        """One block, so many times less sure: move what is known towards it; what was not expected of it."""
        mean, cov, size = self._mean, self._cov, len(self._mean)
        on = [*self._rows(block.on), *([size - 1] if block.disturbed else [])]
        towards = [sum(row[j] for j in on) for row in cov]
        variance = sum(towards[j] for j in on) + (less_sure * noise) ** 2
        unexpected = block.pace - sum(mean[j] for j in on)
        limit = _PULL * math.sqrt(variance)
        pulled = max(-limit, min(limit, unexpected))
        for i in range(size):
            mean[i] += towards[i] * pulled / variance
        for i in range(size):
            for j in range(size):
                cov[i][j] -= towards[i] * towards[j] / variance
        # A scale on which a residual is comparable to the noise: what the model itself did not know is taken out.
        return unexpected * noise / math.sqrt(variance)


def _cholesky(matrix: list[list[float]]) -> list[list[float]]:
    size = len(matrix)
    factor = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(factor[i][k] * factor[j][k] for k in range(j))
            if i == j:
                factor[i][i] = math.sqrt(max(rest, 1e-12))
            else:
                factor[i][j] = rest / factor[j][j]
    return factor
