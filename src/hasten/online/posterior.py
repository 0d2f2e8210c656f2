"""A Bayesian regression of log(seconds per step) on the techniques that were on, one block at a time. No torch.

log(seconds per step) = level + sum of the effects of what is on + what known pairs do together + noise. The level
drifts (the machine is shared, the training goes on); effects stay. Everything is normal, so one block is one step of a
Kalman filter. Blocks that others disturbed (see `taken.py`) are slower by something that they have in common, and count
for a ninth.

Real figures have longer tails than normal ones, so the filter runs over all blocks several times. What lies more than
three deviations off after a run has its deviation widened to a third of that in the next one. For a block (a hiccup of
the machine) that means that it decides nothing; for an effect (a technique that makes steps 25 times slower), that its
expectation does not hold it back, and the other effects need not make up for it. This is the idea of iteratively
reweighted least squares (Holland and Welsch 1977).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hasten.online.prior import cholesky

_DRIFT = 0.15  # of the noise: how far the level walks between two blocks
_LEAST_NOISE = 0.01
_FIRST_NOISE = 0.06
_ENOUGH = 6  # blocks that tell the noise
_FAR = 3.0  # standard deviations beyond which a block or an effect is less sure than it was taken to be
_NEAR = 5  # blocks on either side that tell the level at a block
_RUNS = 8  # of the filter at the most: two or three are enough as a rule
_STEADY = 0.02  # of the noise, and of what is widened: a run that changes them by less is the last
_RESTART = 0.15  # how much the level may change from one process to the next
_DISTURBED = (0.2, 0.5)  # how much slower steps are while others take of the CPU: mean and deviation
_LESS_SURE = 3.0  # times as far as a quiet block may a disturbed one be off


@dataclass(frozen=True)
class CandidateEstimate:
    """Estimate of one candidate's effect.

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


@dataclass
class _Filter:
    """A run of the Kalman filter: what is known after the blocks that it has seen.

    Attributes:
        mean: Of the level, the effects of candidates and pairs, and of being disturbed.
        cov: Covariance of these.
    """

    mean: list[float]
    cov: list[list[float]]

    def step(self, rows: Sequence[int], pace: float, noise: float, far: float) -> tuple[float, bool]:
        """Take in a block.

        Args:
            rows: What acted in it.
            pace: log(seconds per step).
            noise: Standard deviation of such a block.
            far: How many times less sure it is, since it lies far off.

        Returns:
            How many deviations off it was, `far` aside; and whether what acted in it was known better than it measures.
        """
        towards = [sum([row[j] for j in rows]) for row in self.cov]
        known = max(0.0, sum(towards[j] for j in rows))
        unexpected = pace - sum(self.mean[j] for j in rows)
        variance = known + (far * noise) ** 2
        self.mean = [one + share * (unexpected / variance) for one, share in zip(self.mean, towards, strict=True)]
        self.cov = [
            [one - share * other for one, other in zip(row, towards, strict=True)]
            for row, share in zip(self.cov, [share / variance for share in towards], strict=True)
        ]
        return abs(unexpected) / math.sqrt(known + noise * noise), known <= noise * noise


class Posterior:
    """Posterior over every candidate's effect.

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
        self._fitted: tuple[_Filter, float] | None = None

    def add(self, on: Collection[int], seconds: float, process: int = 0, disturbed: bool = False) -> None:
        """A block was measured."""
        self.seen.append(Seen(frozenset(on), math.log(seconds), process, disturbed))
        self._fitted = None

    @property
    def noise(self) -> float:
        """Standard deviation of log(seconds per step) among quiet blocks of one set."""
        return self._fit()[1]

    @property
    def level(self) -> float:
        """Expected log(seconds per step) of a block now, with nothing on."""
        return self._known.mean[0]

    def estimate(self, index: int, beside: Collection[int]) -> CandidateEstimate:
        """Return the estimate of a candidate, with these others on."""
        mean, variance = self._sum([1 + index, *self._rows_of_pairs(index, beside)])
        return CandidateEstimate(
            mean,
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
        mean, variance = self._sum(self._rows(on)[1:])
        return mean, math.sqrt(max(0.0, variance))

    def better(self, on: Collection[int], than: Collection[int]) -> float:
        """Probability that steps are faster with these on than with those, which are among them."""
        mean, variance = self._sum(set(self._rows(on)) - set(self._rows(than)))
        return 0.5 * math.erfc(mean / math.sqrt(2 * max(1e-12, variance)))

    def means(self) -> list[float]:
        """Expected effects of the candidates, then of the pairs."""
        return self._known.mean[1:-1]

    def covariance(self) -> list[list[float]]:
        """Covariance of the effects of the candidates, then of the pairs."""
        return [row[1:-1] for row in self._known.cov[1:-1]]

    def draw(self, lot: random.Random) -> list[float]:
        """Draw the effects of all candidates and pairs at once, as likely as they are."""
        mean, factor = self._known.mean, cholesky(self._known.cov, 1e-12)[0]
        normal = [lot.gauss(0.0, 1.0) for _ in mean]
        return [mean[i] + sum(factor[i][j] * normal[j] for j in range(i + 1)) for i in range(1, len(factor) - 1)]

    # -- what acts in a block ------------------------------------------------------------------------------

    def _rows(self, on: Collection[int]) -> list[int]:
        """Return the terms of a block with these on: the level, the candidates, the pairs of which both are on."""
        first = 1 + len(self.priors)
        together = (first + place for place, (one, other) in enumerate(self.pairs) if one in on and other in on)
        return [0, *(1 + i for i in on), *together]

    def _rows_of(self, block: Seen) -> list[int]:
        """Return the terms of a block that was measured."""
        disturbed = 1 + len(self.priors) + len(self.pairs)
        return [*self._rows(block.on), *([disturbed] if block.disturbed else [])]

    def _rows_of_pairs(self, index: int, beside: Collection[int]) -> list[int]:
        first = 1 + len(self.priors)
        return [
            first + place
            for place, (one, other) in enumerate(self.pairs)
            if (one == index and other in beside) or (other == index and one in beside)
        ]

    def _sum(self, rows: Collection[int]) -> tuple[float, float]:
        """Mean and variance of a sum."""
        known = self._known
        return sum(known.mean[i] for i in rows), sum(known.cov[i][j] for i in rows for j in rows)

    # -- the fit -------------------------------------------------------------------------------------------

    @property
    def _known(self) -> _Filter:
        return self._fit()[0]

    def _fit(self) -> tuple[_Filter, float]:
        """Run the filter over all blocks until a further run would change little; what is known, and the noise."""
        if self._fitted is not None:
            return self._fitted
        priors = [(self.seen[0].pace if self.seen else 0.0, 1.0), *self.priors, *self.pairs.values(), _DISTURBED]
        noise, wide, far = _FIRST_NOISE, [1.0] * len(priors), [1.0] * len(self.seen)
        for _ in range(_RUNS):
            known, off = self._run(priors, noise, wide, far)
            before = [noise, *wide, *far]
            noise = self._noise_of(off, noise)
            wide = [
                max(1.0, abs(mean - expected) / (_FAR * spread)) if spread else 1.0
                for mean, (expected, spread) in zip(known.mean, priors, strict=True)
            ]
            far = self._far(known.mean, noise)
            if all(abs(one - other) <= _STEADY * one for one, other in zip(before, [noise, *wide, *far], strict=True)):
                break
        self._fitted = known, noise
        return self._fitted

    def _run(
        self, priors: Sequence[tuple[float, float]], noise: float, wide: Sequence[float], far: Sequence[float]
    ) -> tuple[_Filter, list[tuple[float, bool]]]:
        """Run the filter over all blocks.

        Args:
            priors: What is expected: mean and spread of each.
            noise: Standard deviation of a quiet block.
            wide: How many times as wide each spread is taken to be.
            far: How many times less sure each block is.

        Returns:
            What is known then, and what `_Filter.step` said of each block.
        """
        known = _Filter([mean for mean, _ in priors], [[0.0] * len(priors) for _ in priors])
        for i, (_, spread) in enumerate(priors):
            known.cov[i][i] = (spread * wide[i]) ** 2
        for (i, j), covariance in self._shared.items():
            known.cov[1 + i][1 + j] = covariance
        process = self.seen[0].process if self.seen else 0
        off = []
        for block, less_sure, times in zip(self.seen, self._less_sure(), far, strict=True):
            known.cov[0][0] += (_DRIFT * noise) ** 2
            if block.process != process:
                process = block.process
                known.cov[0][0] += _RESTART**2
            off.append(known.step(self._rows_of(block), block.pace, less_sure * noise, times))
        return known, off

    def _less_sure(self) -> list[float]:
        """How many times less sure than a quiet block each is, since others disturbed it."""
        # Where others disturb all the time, there is nothing better to go by: the noise is that of disturbed blocks.
        always = len(self.seen) > _ENOUGH and all(block.disturbed for block in self.seen)
        return [_LESS_SURE if block.disturbed and not always else 1.0 for block in self.seen]

    def _noise_of(self, off: Sequence[tuple[float, bool]], noise: float) -> float:
        """Noise by how far off blocks were; where these are too few, the one that the filter ran with.

        Best told by blocks that nobody disturbed and whose sets were known before, such as a set that was measured
        again: what was unexpected of the others is due to effects that were not known yet.
        """
        behind = list(zip(self.seen, off, strict=True))[1:]  # the first is the level itself
        quiet = [one for block, one in behind if not block.disturbed]
        told = quiet if len(quiet) >= _ENOUGH else [one for _, one in behind]
        known = [one for one in told if one[1]]
        told = known if len(known) >= _ENOUGH else told
        if len(told) < _ENOUGH:
            return noise
        # The median is not moved by hiccups; 1.48 times it is a normal distribution's standard deviation.
        return max(_LEAST_NOISE, 1.48 * noise * statistics.median(deviations for deviations, _ in told))

    def _far(self, mean: Sequence[float], noise: float) -> list[float]:
        """How many times less sure each block is, for being more than three deviations off those around it."""
        rest = [block.pace - sum(mean[i] for i in self._rows_of(block)[1:]) for block in self.seen]
        far = []
        for at, (block, less_sure) in enumerate(zip(self.seen, self._less_sure(), strict=True)):
            around = range(max(0, at - _NEAR), min(len(rest), at + _NEAR + 1))
            level = statistics.median(rest[i] for i in around if self.seen[i].process == block.process)
            far.append(max(1.0, abs(rest[at] - level) / (_FAR * noise * less_sure)))
        return far
