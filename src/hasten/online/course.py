"""The course of a search: what is on in the next block, and which techniques are chosen at its end. No torch.

All that applies is on from the start; then each block has on what a draw from the posterior takes to help (Thompson
sampling), so that what is doubtful is asked most, and what is clear soon no more. Choosing is not claiming: the
claim is measured afterwards, on blocks of its own.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from hasten.online.options import Candidate
from hasten.online.posterior import CandidateEstimate, Posterior
from hasten.online.prior import Prior, pair_key
from hasten.techniques import CATALOGUE, Effect, Liveness

_LEAST_SURE = {Effect.EXACT: 0.6, Effect.ROUNDING: 0.7, Effect.SAMPLING: 0.95, Effect.TRAJECTORY: 0.95}
_SURE_TOGETHER = 0.95
_HARMS = 0.5  # less sure to help than this, and it leaves even the set that won
_WORTH = 0.004  # of log(seconds per step): less is not worth a line in a plan
_SETTLED = 0.97  # a technique this sure to help, or not to, is asked no more
# What relieves the same part, or is read by the other: their worths are no sum.
_TOGETHER = {
    ("loader_workers", "cpu_threads"): (-0.15, 0.25),  # threads that wait for work keep the workers' cores busy
    ("loader_workers", "sample_cache"): (0.0, 0.15),
    ("loader_workers", "read_ahead"): (0.0, 0.15),  # workers make whole samples: nothing is left to read ahead
    ("read_ahead", "sample_cache"): (0.0, 0.15),
    ("precision", "matmul_precision"): (0.0, 0.1),
    ("precision", "channels_last"): (0.0, 0.12),
    ("precision", "allocator"): (0.0, 0.12),
    ("precision", "attention"): (
        0.0,
        0.2,
    ),  # its kernels differ by dtype: by hand it may lose alone and win beside bf16
    ("matmul_precision", "attention"): (0.0, 0.2),
    ("compile", "precision"): (0.0, 0.12),
    ("compile", "channels_last"): (0.0, 0.12),
    ("compile", "attention"): (0.0, 0.12),
    ("compile", "cpu_threads"): (0.0, 0.12),
}
"""Expectation of what two do together beyond what each does alone (log(seconds per step): mean, standard deviation)."""
AS_GOOD = 0.015  # of log(seconds per step): sets this near to each other are alike
_AGREES = 0.5  # of what an earlier tune left open: as far new blocks may move its mean
_FINE = 0.02  # of log(seconds per step): a spread at which what was known need not be asked again
_NO_DOUBT = 1e-3
_OF_ITS_OWN = 0.5  # of the deviation before anything was measured: above it, blocks do not tell a candidate from others
_LEAST_BLOCKS = 2  # on and off, before anything is settled
_LATEST = 8  # blocks that tell how long the next takes


class Course:
    """One search.

    Args:
        candidates: What may be on.
        seed: Of the draws.
        careful: Add what never ran before one by one, since a process crashed.
        validation_share: Share of an epoch's time that validation takes, from 0 to 1.
        live: Whether techniques are switched while the training runs: what comes last then has a part of its own.
        prior: What an earlier tune knew, in the place of the candidates' own expectations.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        seed: int = 0,
        careful: bool = False,
        validation_share: float = 0.0,
        live: bool = True,
        prior: Prior | None = None,
    ) -> None:
        self.candidates = list(candidates)
        self.posterior = Posterior(
            [(one.mean, one.spread) for one in candidates], _pairs(candidates, prior), _shared(candidates, prior)
        )
        self.validation = Posterior([one.validation or (one.mean, one.spread) for one in candidates])
        self._validation_share = validation_share
        self._settled: frozenset[int] | None = None
        self.out: dict[int, str] = {}  # off for good, and why
        self.lasting: set[int] = set()  # of them: off in the next tune too
        self.careful = careful
        self._took: deque[tuple[float, float]] = deque(maxlen=_LATEST)  # seconds of blocks, and what others took
        self._lot = random.Random(seed)
        self._last = self.of(Liveness.LAST) if live else set()

    def liveness(self, index: int) -> Liveness:
        """When this candidate can be switched."""
        one = self.candidates[index]
        return CATALOGUE[one.name].liveness_of(one.setting)

    def of(self, liveness: Liveness) -> set[int]:
        """The candidates that are switched at such a moment."""
        return {i for i in range(len(self.candidates)) if self.liveness(i) is liveness}

    def saw(self, on: Collection[int], seconds: float, process: int = 0, disturbed: bool = False) -> None:
        """A block was measured."""
        self.posterior.add(on, seconds, process, disturbed)

    def took(self, seconds: float, taken: float | None) -> None:
        """A block took so many seconds, with all that does not count; others took such a share of the CPU meanwhile."""
        self._took.append((seconds, taken or 0.0))

    @property
    def block_seconds(self) -> float:
        """Seconds that a block takes, with all that does not count, by the latest; 0.0 before the first."""
        return statistics.median(seconds for seconds, _ in self._took) if self._took else 0.0

    @property
    def taken(self) -> float:
        """Share of the CPU that others take, from 0 to 1, by the latest blocks; 0.0 where that cannot be seen."""
        return statistics.median(taken for _, taken in self._took) if self._took else 0.0

    def saw_validation(self, on: Collection[int], seconds: float) -> None:
        """A pass of validation took so many seconds a batch."""
        if seconds > 0:
            self.validation.add(on, seconds)

    def drop(self, indices: Iterable[int], reason: str, lasting: bool = False) -> None:
        """These crash, hang or spoil the training: off for good; where `lasting`, in the next tune of it too."""
        for index in indices:
            self.out.setdefault(index, reason)
            if lasting:
                self.lasting.add(index)

    # -- what is on next -----------------------------------------------------------------------------------

    def all_on(self) -> frozenset[int]:
        """All that is expected to help, the best setting of each technique."""
        expected = [*(mean for mean, _ in self.posterior.priors), *(mean for mean, _ in self.posterior.pairs.values())]
        return self._one_by_one(self._best(expected, self._now()))

    def wants(self) -> frozenset[int]:
        """Return the candidates that help by a draw from the posterior."""
        effects, share = self.posterior.draw(self._lot), self._share()
        if share:
            others = self.validation.draw(self._lot)
            effects[: len(others)] = [
                (1 - share) * step + share * other for step, other in zip(effects, others, strict=False)
            ]
        return self._one_by_one(self._best(effects, self._now()))

    def _now(self) -> set[int]:
        return set(range(len(self.candidates))) - set(self.out) - self._last

    def _one_by_one(self, on: frozenset[int]) -> frozenset[int]:
        """All of them; after a crash, of what never ran before one."""
        if not self.careful:
            return on
        ran = set().union(*(block.on for block in self.posterior.seen))
        return frozenset((on & ran) | set(sorted(on - ran)[:1]))

    def _best(self, effects: Sequence[float], allowed: Collection[int]) -> frozenset[int]:
        """The set with the least sum of effects, one setting of each technique: changed by one while that helps."""
        pairs = dict(zip(self.posterior.pairs, effects[len(self.candidates) :], strict=False))

        def worth(on: frozenset[int]) -> float:
            together = sum(effect for (one, other), effect in pairs.items() if one in on and other in on)
            return sum(effects[i] for i in on) + together

        best = frozenset(self._one_of_each([i for i in allowed if effects[i] < 0], effects))
        while True:
            others = [self._flipped(best, i) for i in allowed]
            other = min(others, key=worth, default=best)
            if worth(other) >= worth(best) - 1e-12:
                return best
            best = other

    def _one_of_each(self, indices: Iterable[int], effects: Sequence[float]) -> set[int]:
        best: dict[str, int] = {}
        for index in indices:
            name = self.candidates[index].name
            if name not in best or effects[index] < effects[best[name]]:
                best[name] = index
        return set(best.values())

    def _flipped(self, on: frozenset[int], index: int) -> frozenset[int]:
        if index in on:
            return on - {index}
        name = self.candidates[index].name
        return frozenset({i for i in on if self.candidates[i].name != name} | {index})

    # -- what is chosen ------------------------------------------------------------------------------------

    def estimates(self, beside: Collection[int] | None = None) -> list[CandidateEstimate]:
        """What is known of each candidate, with the chosen others on: of a step and, by its share, of validation."""
        on = self.chosen() if beside is None else beside
        return [self._estimate(i, on) for i in range(len(self.candidates))]

    def _estimate(self, index: int, on: Collection[int]) -> CandidateEstimate:
        name = self.candidates[index].name
        found = self.posterior.estimate(index, {i for i in on if self.candidates[i].name != name})
        share = self._share()
        return _mixed(found, self.validation.estimate(index, ()), share) if share else found

    def _share(self) -> float:
        return self._validation_share if self.validation.seen else 0.0

    def finalists(self) -> list[frozenset[int]]:
        """Sets that may be the best: what is sure beside the others, what is expected, what ran fastest.

        What comes last is not among them: it is measured beside what was settled.
        """
        ran = {i for block in self.posterior.seen for i in block.on} - set(self.out) - self._last
        best = self._best(self._expected(), ran)
        return list(dict.fromkeys([self._as_sure_as_asked(best), best, *self._fastest()]))

    def _fastest(self) -> list[frozenset[int]]:
        """The set of blocks that ran fastest, by more than one block; none of what is off for good in it."""
        paces: dict[frozenset[int], list[float]] = {}
        disturbed = all(block.disturbed for block in self.posterior.seen)
        for block in self.posterior.seen:
            if block.disturbed == disturbed and not block.on & (set(self.out) | self._last):
                paces.setdefault(block.on, []).append(block.pace)
        often = {on: statistics.median(seen) for on, seen in paces.items() if len(seen) > 1}
        return [min(often, key=lambda on: often[on])] if often else []

    def settle(self, on: frozenset[int]) -> None:
        """This set ran faster than the others that may be the best: it is what is chosen."""
        self._settled = on

    @property
    def settled(self) -> frozenset[int] | None:
        """What was settled, without a last technique that failed since; None before that, or if others of it failed."""
        if self._settled is None or (self._settled & set(self.out)) - self._last:
            return None
        return self._settled - set(self.out)

    def best_measured(self) -> frozenset[int]:
        """Of all sets that ran, those first that may be the best, the first that is as fast as any of them."""
        seen = [block.on for block in self.posterior.seen if not block.on & (set(self.out) | self._last)]
        ran = list(dict.fromkeys([*(one for one in self.finalists() if one in seen), *seen]))
        fastest = min(map(self._at_most, ran), default=0.0)
        return next((one for one in ran if self._at_most(one) <= fastest + AS_GOOD), frozenset())

    def chosen(self) -> frozenset[int]:
        """What was settled; before that, what helps beside the others as surely as its effect on the result asks."""
        if self._settled is not None:
            return self._without_the_needless(self._settled - set(self.out))
        ran = {i for block in self.posterior.seen for i in block.on}
        return self._as_sure_as_asked(self._best(self._expected(), ran - set(self.out)))

    def _at_most(self, on: Collection[int]) -> float:
        """What log(seconds per step) changes by with these on, a standard deviation to the slower side."""
        mean, spread = self.posterior.gain(on)
        return mean + spread

    def _without_the_needless(self, on: frozenset[int]) -> frozenset[int]:
        """Of a set that ran, without what does not help: as far as the rest is surely no slower for it."""
        while on:
            unsure = [i for i in on if not self._is_sure(i, self._estimate(i, on), _HARMS)]
            leaves = [i for i in unsure if self._must_be_sure(i) or self._may_leave(i, on)]
            if not leaves:
                break
            on -= {min(leaves, key=lambda i: self._estimate(i, on).helps)}
        return on

    def _may_leave(self, index: int, on: frozenset[int]) -> bool:
        """Whether a set is no slower without this; kernels are compiled for one set, and others compile them again."""
        if on & self._last - {index}:
            return False
        return self._at_most(on - {index}) <= self._at_most(on) + AS_GOOD

    def _expected(self) -> list[float]:
        effects = self.posterior.means()
        if self._share():
            alone = [self._estimate(i, ()).mean for i in range(len(self.candidates))]
            effects = [*alone, *effects[len(alone) :]]
        return effects

    def _as_sure_as_asked(self, best: frozenset[int]) -> frozenset[int]:
        """What is sure by itself; and what is so only together, where there was no time to tell which of it helps."""
        sure = self._without_the_unsure(best)
        together = self._without_the_unsure(best, _HARMS)
        return together if self.posterior.better(together, sure & together) >= _SURE_TOGETHER else sure

    def _without_the_unsure(self, on: frozenset[int], least: float = 1.0) -> frozenset[int]:
        while on:
            weak = [i for i in on if not self._is_sure(i, self._estimate(i, on), least)]
            if not weak:
                break
            on -= {min(weak, key=lambda i: self._estimate(i, on).helps)}
        return on

    def _is_sure(self, index: int, found: CandidateEstimate, least: float = 1.0) -> bool:
        """Whether it helps as surely as its effect on the result asks, or as `least` where it only rounds."""
        asked = _LEAST_SURE[self._effect(index)]
        if not self._must_be_sure(index):
            asked = min(asked, least)
        return found.helps >= asked and -found.mean >= _WORTH

    def _effect(self, index: int) -> Effect:
        one = self.candidates[index]
        return CATALOGUE[one.name].effect_of(one.setting)

    def _must_be_sure(self, index: int) -> bool:
        """Whether it changes the result by more than rounding."""
        return self._effect(index) not in (Effect.EXACT, Effect.ROUNDING)

    def doubtful(self) -> list[int]:
        """Of which more blocks could still change the choice."""
        return [
            i
            for i, one in enumerate(self.estimates())
            if not (i in self.out or i in self._last or self._is_as_known(i, one) or self._is_clear(i, one))
        ]

    def prior(self) -> Prior:
        """What is known of all that was measured, now or before, as the next tune's expectation."""
        ran = {i for block in self.posterior.seen for i in block.on}
        asked = [i in ran or one.known is not None for i, one in enumerate(self.candidates)]
        asked += [asked[i] and asked[j] for i, j in self.posterior.pairs]
        rows = _rows(self.candidates, self.posterior.pairs)
        whole = Prior(tuple(rows), tuple(self.posterior.means()), tuple(map(tuple, self.posterior.covariance())))
        return whole.only([row for row, wanted in zip(rows, asked, strict=True) if wanted])

    def _is_clear(self, index: int, found: CandidateEstimate) -> bool:
        """Whether enough is known: by two blocks on either side that tell it from others, or one without doubt."""
        blocks, doubt = self.posterior.asked(index), min(found.helps, 1 - found.helps)
        expected, spread = self.posterior.priors[index]
        own = expected * found.mean > 0 or found.spread < _OF_ITS_OWN * spread  # or it may bear the blame of others
        if blocks >= _LEAST_BLOCKS and own:
            return doubt < 1 - _SETTLED or abs(found.mean) + found.spread < 2 * _WORTH
        return blocks >= 1 and doubt < _NO_DOUBT

    def _is_as_known(self, index: int, now: CandidateEstimate) -> bool:
        """Whether an earlier tune measured it, what was seen since agrees, and that is enough to choose by."""
        known = self.candidates[index].known
        if known is None or abs(now.mean - known[0]) > _AGREES * known[1]:
            return False
        return now.spread < _FINE or now.helps < 1 - _LEAST_SURE[Effect.ROUNDING] or self._is_sure(index, now)


def _pairs(candidates: Sequence[Candidate], prior: Prior | None) -> dict[tuple[int, int], tuple[float, float]]:
    """The candidates that may change each other's worth, and what is expected of each pair."""
    pairs = {
        (i, j): _TOGETHER[one.name, other.name]
        for i, one in enumerate(candidates)
        for j, other in enumerate(candidates)
        if (one.name, other.name) in _TOGETHER
    }
    if prior is not None:
        for pair, name in zip(pairs, _rows(candidates, pairs)[len(candidates) :], strict=True):
            if name in prior.rows:
                row = prior.rows.index(name)
                pairs[pair] = prior.mean[row], prior.spread(row)
    return pairs


def _shared(candidates: Sequence[Candidate], prior: Prior | None) -> dict[tuple[int, int], float]:
    """How the effects of candidates and pairs hang together, as far as an earlier tune knew them."""
    if prior is None:
        return {}
    rows = _rows(candidates, _pairs(candidates, None))
    place = {number: prior.rows.index(name) for number, name in enumerate(rows) if name in prior.rows}
    return {(i, j): prior.covariance[place[i]][place[j]] for i in place for j in place if i != j}


def _rows(candidates: Sequence[Candidate], pairs: Iterable[tuple[int, int]]) -> list[str]:
    """Names of the effects: those of candidates, then of pairs."""
    names = [one.key for one in candidates]
    return [*names, *(pair_key(names[i], names[j]) for i, j in pairs)]


def _mixed(step: CandidateEstimate, validation: CandidateEstimate, share: float) -> CandidateEstimate:
    """What is known of the time of an epoch of which validation takes a share."""
    mean = (1 - share) * step.mean + share * validation.mean
    spread = math.hypot((1 - share) * step.spread, share * validation.spread)
    return CandidateEstimate(mean, spread, step.blocks, step.without)
