"""Bayesian regression of log(seconds per step) on the techniques that were on, one block at a time. No torch.

The model: log(seconds per step) = level + sum of the effects of the techniques that are on + interactions of known
pairs + noise. The level drifts (the machine is shared, and the training itself changes); effects are constant. All
terms are normal, so taking in one block is one step of a Kalman filter. Blocks that other processes disturbed (see
`cpu_contention.py`) share one more effect, which slows them down, and weigh a ninth.

Real measurements have heavier tails than a normal distribution, so the filter runs over all blocks several times. A
block or effect that lies more than three standard deviations from its expectation after one run has its deviation
widened, to a third of that distance, in the next. For a block (a hiccup of the machine) this means that it decides
nothing. For an effect (a technique that makes steps 25 times slower) it means that its prior does not hold it back, so
that the other effects need not absorb the difference. This is iteratively reweighted least squares (Holland and Welsch
1977).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hasten.online.prior import cholesky

_DRIFT = 0.15  # of the noise: standard deviation of the level's random walk between two blocks
_LEAST_NOISE = 0.01
_FIRST_NOISE = 0.06
_ENOUGH = 6  # blocks from which the noise can be estimated
_OUTLIER = 3.0  # standard deviations: a block or an effect beyond that is an outlier, and its deviation is widened
_NEAR = 5  # blocks on either side from which the level at a block is estimated
_RUNS = 8  # of the filter, at most; two or three are usually enough
_STEADY = 0.02  # relative change of the noise and the widened deviations: the last run changes them by less
_RESTART = 0.15  # standard deviation of the change of the level from one process to the next
_DISTURBED = (0.2, 0.5)  # prior (mean, deviation) of the slowdown while other processes take CPU
_LESS_SURE = 3.0  # a disturbed block's standard deviation, in those of a quiet one


@dataclass(frozen=True)
class CandidateEstimate:
    """Estimate of one candidate's effect.

    Attributes:
        mean: Change of log(seconds per step) when it is on; negative is faster.
        spread: Standard deviation of that change.
        blocks: Number of blocks in which it was on.
        without: Number of blocks in which it was off.
    """

    mean: float
    spread: float
    blocks: int
    without: int

    @property
    def helps(self) -> float:
        """Probability that the candidate makes a step faster."""
        return 0.5 * math.erfc(self.mean / (self.spread * math.sqrt(2)))

    @property
    def ratio(self) -> tuple[float, float, float]:
        """Speed-up of a step: the median, and the lower and upper end of the 95 % interval."""
        half = 1.96 * self.spread
        return math.exp(-self.mean), math.exp(-self.mean - half), math.exp(-self.mean + half)


@dataclass(frozen=True)
class PacedBlock:
    """Measured block: the candidates that were on, log(seconds per step), its process, and whether it was disturbed."""

    on: frozenset[int]
    pace: float
    process: int = 0
    disturbed: bool = False


@dataclass
class _Filter:
    """State of a Kalman filter after the blocks that it has taken in.

    Attributes:
        mean: Mean of the level, of the effects of candidates and of pairs, and of the effect of being disturbed.
        cov: Their covariance.
    """

    mean: list[float]
    cov: list[list[float]]

    def step(self, rows: Sequence[int], pace: float, noise: float, factor: float) -> tuple[float, bool]:
        """Take in a block.

        Args:
            rows: Indices of the terms that acted in it.
            pace: log(seconds per step).
            noise: Standard deviation of such a block.
            factor: Factor by which the noise is widened because the block is an outlier.

        Returns:
            The block's distance from its prediction in standard deviations, without `factor`; and whether the
            prediction was more certain than the block's own noise.
        """
        covariances = [sum([row[j] for j in rows]) for row in self.cov]
        predicted_variance = max(0.0, sum(covariances[j] for j in rows))
        unexpected = pace - sum(self.mean[j] for j in rows)
        variance = predicted_variance + (factor * noise) ** 2
        self.mean = [mean + gain * (unexpected / variance) for mean, gain in zip(self.mean, covariances, strict=True)]
        self.cov = [
            [value - gain * covariance for value, covariance in zip(row, covariances, strict=True)]
            for row, gain in zip(self.cov, [gain / variance for gain in covariances], strict=True)
        ]
        return abs(unexpected) / math.sqrt(predicted_variance + noise * noise), predicted_variance <= noise * noise


class Posterior:
    """Posterior over every candidate's effect.

    Args:
        priors: (mean, standard deviation) of each candidate's effect, before any measurement.
        pairs: Pairs of candidates that may interact, with (mean, standard deviation) of the interaction: what both do
            together beyond the sum of what each does alone.
        shared: Prior covariance of two of these effects, by their numbers (candidates first, then pairs).
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
        self.blocks: list[PacedBlock] = []
        self._fitted: tuple[_Filter, float] | None = None

    def add(self, on: Collection[int], seconds: float, process: int = 0, disturbed: bool = False) -> None:
        """Take in a measured block. `seconds` is per step."""
        self.blocks.append(PacedBlock(frozenset(on), math.log(seconds), process, disturbed))
        self._fitted = None

    @property
    def noise(self) -> float:
        """Standard deviation of log(seconds per step) among undisturbed blocks of one set of techniques."""
        return self._fit()[1]

    @property
    def level(self) -> float:
        """Expected log(seconds per step) of the next block with nothing on."""
        return self._state.mean[0]

    def estimate(self, index: int, beside: Collection[int]) -> CandidateEstimate:
        """Return the estimate of a candidate's effect while the candidates `beside` are on."""
        mean, variance = self._sum([1 + index, *self._rows_of_pairs(index, beside)])
        return CandidateEstimate(
            mean,
            math.sqrt(max(1e-12, variance)),
            sum(index in block.on for block in self.blocks),
            sum(index not in block.on for block in self.blocks),
        )

    def least_blocks(self, index: int) -> float:
        """Return the lesser number of blocks: with the candidate on, or with it off. A disturbed one counts a third."""
        weights = [(index in block.on, 1 / _LESS_SURE if block.disturbed else 1.0) for block in self.blocks]
        return min(sum(weight for on, weight in weights if on is is_on) for is_on in (True, False))

    def gain(self, on: Collection[int]) -> tuple[float, float]:
        """Return mean and standard deviation of the change of log(seconds per step) when these are on."""
        mean, variance = self._sum(self._rows(on)[1:])
        return mean, math.sqrt(max(0.0, variance))

    def better(self, on: Collection[int], than: Collection[int]) -> float:
        """Return the probability that steps are faster with `on` than with `than`."""
        state, rows, other_rows = self._state, set(self._rows(on)), set(self._rows(than))
        signs = {row: 1 if row in rows else -1 for row in rows ^ other_rows}
        mean = sum(sign * state.mean[i] for i, sign in signs.items())
        variance = sum(signs[i] * signs[j] * state.cov[i][j] for i in signs for j in signs)
        return 0.5 * math.erfc(mean / math.sqrt(2 * max(1e-12, variance)))

    def means(self) -> list[float]:
        """Return the expected effects of the candidates, then of the pairs."""
        return self._state.mean[1:-1]

    def covariance(self) -> list[list[float]]:
        """Return the covariance of the effects of the candidates, then of the pairs."""
        return [row[1:-1] for row in self._state.cov[1:-1]]

    def draw(self, lot: random.Random) -> list[float]:
        """Draw the effects of all candidates, then of all pairs, from their joint posterior."""
        mean, factor = self._state.mean, cholesky(self._state.cov, 1e-12)[0]
        normal = [lot.gauss(0.0, 1.0) for _ in mean]
        return [mean[i] + sum(factor[i][j] * normal[j] for j in range(i + 1)) for i in range(1, len(factor) - 1)]

    # -- what acts in a block ------------------------------------------------------------------------------

    def _rows(self, on: Collection[int]) -> list[int]:
        """Return the terms that act in a block with these on: the level, the candidates, the pairs with both on."""
        first_pair = 1 + len(self.priors)
        together = (
            first_pair + number
            for number, (first_on, second_on) in enumerate(self.pairs)
            if first_on in on and second_on in on
        )
        return [0, *(1 + i for i in on), *together]

    def _rows_of(self, block: PacedBlock) -> list[int]:
        """Return the terms that acted in a measured block."""
        disturbed = 1 + len(self.priors) + len(self.pairs)
        return [*self._rows(block.on), *([disturbed] if block.disturbed else [])]

    def _rows_of_pairs(self, index: int, beside: Collection[int]) -> list[int]:
        """Return the terms of the pairs that a candidate forms with the candidates `beside`."""
        first_pair = 1 + len(self.priors)
        return [
            first_pair + number
            for number, (first, second) in enumerate(self.pairs)
            if (first == index and second in beside) or (second == index and first in beside)
        ]

    def _sum(self, rows: Collection[int]) -> tuple[float, float]:
        """Return mean and variance of the sum of these terms."""
        state = self._state
        return sum(state.mean[i] for i in rows), sum(state.cov[i][j] for i in rows for j in rows)

    # -- the fit -------------------------------------------------------------------------------------------

    @property
    def _state(self) -> _Filter:
        return self._fit()[0]

    def _fit(self) -> tuple[_Filter, float]:
        """Run the filter over all blocks until it converges. Return its last state and the noise."""
        if self._fitted is not None:
            return self._fitted
        priors = [(self.blocks[0].pace if self.blocks else 0.0, 1.0), *self.priors, *self.pairs.values(), _DISTURBED]
        noise, prior_factors, block_factors = _FIRST_NOISE, [1.0] * len(priors), [1.0] * len(self.blocks)
        for _ in range(_RUNS):
            state, distances = self._run(priors, noise, prior_factors, block_factors)
            previous = [noise, *prior_factors, *block_factors]
            noise = self._noise_of(distances, noise)
            prior_factors = [
                max(1.0, abs(mean - expected) / (_OUTLIER * spread)) if spread else 1.0
                for mean, (expected, spread) in zip(state.mean, priors, strict=True)
            ]
            block_factors = self._outlier_factors(state.mean, noise)
            if all(
                abs(old - new) <= _STEADY * old
                for old, new in zip(previous, [noise, *prior_factors, *block_factors], strict=True)
            ):
                break
        self._fitted = state, noise
        return self._fitted

    def _run(
        self,
        priors: Sequence[tuple[float, float]],
        noise: float,
        prior_factors: Sequence[float],
        block_factors: Sequence[float],
    ) -> tuple[_Filter, list[tuple[float, bool]]]:
        """Run the filter over all blocks once.

        Args:
            priors: Mean and standard deviation of each term.
            noise: Standard deviation of a quiet block.
            prior_factors: Factor by which each prior's standard deviation is widened.
            block_factors: Factor by which each block's noise is widened.

        Returns:
            The filter's last state, and what `_Filter.step` returned for each block.
        """
        state = _Filter([mean for mean, _ in priors], [[0.0] * len(priors) for _ in priors])
        for i, (_, spread) in enumerate(priors):
            state.cov[i][i] = (spread * prior_factors[i]) ** 2
        for (i, j), covariance in self._shared.items():
            state.cov[1 + i][1 + j] = covariance
        process = self.blocks[0].process if self.blocks else 0
        distances = []
        for block, less_sure, factor in zip(self.blocks, self._less_sure(), block_factors, strict=True):
            state.cov[0][0] += (_DRIFT * noise) ** 2
            if block.process != process:
                process = block.process
                state.cov[0][0] += _RESTART**2
            distances.append(state.step(self._rows_of(block), block.pace, less_sure * noise, factor))
        return state, distances

    def _less_sure(self) -> list[float]:
        """Return each block's noise in that of a quiet block: more than 1 if other processes disturbed it."""
        # If every block was disturbed there is nothing better to compare with: the noise is that of disturbed blocks.
        always = len(self.blocks) > _ENOUGH and all(block.disturbed for block in self.blocks)
        return [_LESS_SURE if block.disturbed and not always else 1.0 for block in self.blocks]

    def _noise_of(self, distances: Sequence[tuple[float, bool]], noise: float) -> float:
        """Return the noise that the blocks' distances from their predictions show.

        Undisturbed blocks whose set was well known before (such as a set measured again) are preferred: the distance of
        the others is partly due to effects that were still unknown. With too few blocks, return `noise` itself.

        Args:
            distances: What `_Filter.step` returned for each block.
            noise: The noise that the filter ran with.
        """
        later = list(zip(self.blocks, distances, strict=True))[1:]  # the first block only sets the level
        quiet = [step for block, step in later if not block.disturbed]
        steps = quiet if len(quiet) >= _ENOUGH else [step for _, step in later]
        predicted = [step for step in steps if step[1]]
        steps = predicted if len(predicted) >= _ENOUGH else steps
        if len(steps) < _ENOUGH:
            return noise
        # Hiccups do not move the median; for a normal distribution 1.48 times it is the standard deviation.
        return max(_LEAST_NOISE, 1.48 * noise * statistics.median(deviations for deviations, _ in steps))

    def _outlier_factors(self, mean: Sequence[float], noise: float) -> list[float]:
        """Return the factor by which each block's noise is widened: more than 1 for outliers among their neighbours."""
        levels = [block.pace - sum(mean[i] for i in self._rows_of(block)[1:]) for block in self.blocks]
        factors = []
        for index, (block, less_sure) in enumerate(zip(self.blocks, self._less_sure(), strict=True)):
            around = range(max(0, index - _NEAR), min(len(levels), index + _NEAR + 1))
            level = statistics.median(levels[i] for i in around if self.blocks[i].process == block.process)
            factors.append(max(1.0, abs(levels[index] - level) / (_OUTLIER * noise * less_sure)))
        return factors
