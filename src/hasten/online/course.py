"""The course of a search: what is on in the next block, and which techniques are chosen at its end. No torch.

The search starts with every applicable technique on. After that, each block has on whatever helps according to a random
draw from the posterior (Thompson sampling): doubtful techniques are measured most often, clear ones soon no more.
Choosing is not claiming: the speed-up that a report states is measured afterwards, on blocks of its own.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from hasten.online.interactions import covariances_of, pairs_of, place_of, rows_of
from hasten.online.options import Candidate
from hasten.online.posterior import CandidateEstimate, Posterior
from hasten.online.prior import Prior
from hasten.techniques import CATALOGUE, Effect, Liveness

_LEAST_SURE = {Effect.EXACT: 0.6, Effect.ROUNDING: 0.7, Effect.SAMPLING: 0.95, Effect.TRAJECTORY: 0.95}
_SURE_TOGETHER = 0.95
_HARMS = 0.5  # probability of helping below which a technique leaves even the fastest set
_WORTH = 0.004  # of log(seconds per step): less is not worth a line in a plan
_SETTLED = 0.97  # a technique this sure to help, or not to, is measured no more
AS_GOOD = 0.015  # of log(seconds per step): sets this close count as equally fast
_AGREES = 0.5  # of an earlier tune's standard deviation: new blocks may move its mean this far and still agree with it
_FINE = 0.02  # of log(seconds per step): a standard deviation at which an earlier estimate need not be measured again
_NO_DOUBT = 1e-3
_OF_ITS_OWN = 0.5  # of the prior's standard deviation: above it, a candidate's effect may really be that of others
_LEAST_BLOCKS = 2  # on and off, before a candidate is settled
_DRAWS = 8  # of sets that all equal the chosen one, after which it has no rival
_LATEST = 8  # blocks from which the duration of the next is estimated


class Course:
    """One search: proposes sets of candidates to measure, and chooses the best.

    Args:
        candidates: Settings that may be on.
        seed: Seed of the random draws.
        careful: Add candidates that never ran before one at a time, because a process crashed.
        validation_share: Share of an epoch's time that validation takes, from 0 to 1.
        live: Whether techniques are switched while the training runs. Then candidates of liveness LAST (compile) are
            measured separately, after the others were settled.
        prior: An earlier tune's estimate, used in place of the candidates' own priors.
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
        priors = [(candidate.mean, candidate.spread) for candidate in candidates]
        self.posterior = Posterior(priors, pairs_of(candidates, prior), covariances_of(candidates, prior))
        on_validation = [candidate.validation for candidate in candidates]
        self.validation = Posterior([own or step for own, step in zip(on_validation, priors, strict=True)])
        self._validation_share = validation_share
        self._settled: frozenset[int] | None = None
        self.dropped: dict[int, str] = {}  # candidates that are off for good -> reason
        self.lasting: set[int] = set()  # those of them that stay off in the next tune
        self.careful = careful
        self._durations: deque[tuple[float, float]] = deque(maxlen=_LATEST)  # of a block: seconds, CPU share taken
        self._random = random.Random(seed)
        self._last = self.with_liveness(Liveness.LAST) if live else set()

    def liveness(self, index: int) -> Liveness:
        """Return when this candidate can be switched."""
        candidate = self.candidates[index]
        return CATALOGUE[candidate.name].liveness_of(candidate.setting)

    def with_liveness(self, liveness: Liveness) -> set[int]:
        """Return the candidates of this liveness."""
        return {i for i in range(len(self.candidates)) if self.liveness(i) is liveness}

    def add_block(self, on: Collection[int], seconds: float, process: int = 0, disturbed: bool = False) -> None:
        """Take in a measured block. `seconds` is per step."""
        self.posterior.add(on, seconds, process, disturbed)

    def note_duration(self, seconds: float, taken: float | None) -> None:
        """Note how long a block took, uncounted steps included, and the share of the CPU that other processes took."""
        self._durations.append((seconds, taken or 0.0))

    @property
    def block_seconds(self) -> float:
        """Seconds that a block takes, uncounted steps included: median of the latest ones; 0.0 before the first."""
        return statistics.median(seconds for seconds, _ in self._durations) if self._durations else 0.0

    @property
    def taken(self) -> float:
        """Share of the CPU that other processes take, 0 to 1: median of the latest blocks; 0.0 if it cannot be seen."""
        return statistics.median(taken for _, taken in self._durations) if self._durations else 0.0

    def add_validation(self, on: Collection[int], seconds: float) -> None:
        """Take in a validation pass. `seconds` is per batch."""
        if seconds > 0:
            self.validation.add(on, seconds)

    def drop(self, indices: Iterable[int], reason: str, lasting: bool = False) -> None:
        """Switch candidates off for good, because they crash, hang or spoil the training.

        Args:
            indices: The candidates.
            reason: Why, for the report.
            lasting: Whether they stay off in the next tune of this training too.
        """
        for index in indices:
            self.dropped.setdefault(index, reason)
            if lasting:
                self.lasting.add(index)

    # -- what is on next -----------------------------------------------------------------------------------

    def all_on(self) -> frozenset[int]:
        """Return every candidate that is expected to help, with the best setting of each technique."""
        expected = [*(mean for mean, _ in self.posterior.priors), *(mean for mean, _ in self.posterior.pairs.values())]
        return self._one_by_one(self._best(expected, self._allowed()))

    def draw_set(self) -> frozenset[int]:
        """Return the candidates that help according to a random draw from the posterior (Thompson sampling)."""
        effects, share = self.posterior.draw(self._random), self._share()
        if share:
            validation_effects = self.validation.draw(self._random)
            effects[: len(validation_effects)] = [
                (1 - share) * step_effect + share * validation_effect
                for step_effect, validation_effect in zip(effects, validation_effects, strict=False)
            ]
        return self._one_by_one(self._best(effects, self._allowed()))

    def _allowed(self) -> set[int]:
        """Return the candidates that may be on now: neither off for good nor measured last."""
        return set(range(len(self.candidates))) - set(self.dropped) - self._last

    def _one_by_one(self, on: frozenset[int]) -> frozenset[int]:
        """Return all of `on`; after a crash, only one candidate of those that never ran before."""
        if not self.careful:
            return on
        ran = set().union(*(block.on for block in self.posterior.blocks))
        return frozenset((on & ran) | set(sorted(on - ran)[:1]))

    def _best(self, effects: Sequence[float], allowed: Collection[int]) -> frozenset[int]:
        """Return the set with the least sum of effects, one candidate per place.

        Greedy: starts with every candidate that helps alone, then flips single candidates while that improves the sum.
        """
        pairs = dict(zip(self.posterior.pairs, effects[len(self.candidates) :], strict=False))

        def total_effect(on: frozenset[int]) -> float:
            interaction = sum(effect for (first, second), effect in pairs.items() if first in on and second in on)
            return sum(effects[i] for i in on) + interaction

        best = frozenset(self._one_of_each([i for i in allowed if effects[i] < 0], effects))
        while True:
            neighbours = [self._flipped(best, i) for i in allowed]
            neighbour = min(neighbours, key=total_effect, default=best)
            if total_effect(neighbour) >= total_effect(best) - 1e-12:
                return best
            best = neighbour

    def _one_of_each(self, indices: Iterable[int], effects: Sequence[float]) -> set[int]:
        """Return the best of these for each place: of a technique's settings, and of what does the same."""
        best: dict[str, int] = {}
        for index in indices:
            place = self._place(index)
            if place not in best or effects[index] < effects[best[place]]:
                best[place] = index
        return set(best.values())

    def _place(self, index: int) -> str:
        return place_of(self.candidates[index].name)

    def _flipped(self, on: frozenset[int], index: int) -> frozenset[int]:
        """Return the set with this candidate removed, or added in place of the one that it excludes."""
        if index in on:
            return on - {index}
        return frozenset({i for i in on if self._place(i) != self._place(index)} | {index})

    # -- what is chosen ------------------------------------------------------------------------------------

    def estimates(self, beside: Collection[int] | None = None) -> list[CandidateEstimate]:
        """Return each candidate's effect on the time of an epoch, with the others `beside` on (default: the chosen)."""
        on = self.chosen() if beside is None else beside
        return [self._estimate(i, on) for i in range(len(self.candidates))]

    def _estimate(self, index: int, on: Collection[int]) -> CandidateEstimate:
        estimate = self.posterior.estimate(index, {i for i in on if self._place(i) != self._place(index)})
        share = self._share()
        return _mixed(estimate, self.validation.estimate(index, ()), share) if share else estimate

    def _share(self) -> float:
        return self._validation_share if self.validation.blocks else 0.0

    def finalists(self) -> list[frozenset[int]]:
        """Return the sets that may be the best: the sure candidates, the expected best, the fastest measured.

        Candidates of liveness LAST (compile) are in none of them: they are measured later, on top of the settled set.
        """
        ran = {i for block in self.posterior.blocks for i in block.on} - set(self.dropped) - self._last
        best = self._best(self._expected(), ran)
        return list(dict.fromkeys([self._sure_enough(best), best, *self._fastest()]))

    def _fastest(self) -> list[frozenset[int]]:
        """Return, as a list of at most one, the set with the fastest median of at least two blocks."""
        paces: dict[frozenset[int], list[float]] = {}
        disturbed = all(block.disturbed for block in self.posterior.blocks)
        for block in self.posterior.blocks:
            if block.disturbed == disturbed and not block.on & (set(self.dropped) | self._last):
                paces.setdefault(block.on, []).append(block.pace)
        medians = {on: statistics.median(set_paces) for on, set_paces in paces.items() if len(set_paces) > 1}
        return [min(medians, key=lambda on: medians[on])] if medians else []

    def settle(self, on: frozenset[int]) -> None:
        """Make this set, which ran faster than the other finalists, the chosen one."""
        self._settled = on

    def rival(self) -> frozenset[int] | None:
        """Return a set that may be faster than the chosen one, by random draws; None if that is not in doubt.

        It differs in techniques that can be switched between two steps. A set with compiled kernels has no rivals, as
        kernels are compiled for one set.
        """
        chosen, by_step = self.chosen(), self.with_liveness(Liveness.STEP)
        if chosen & self._last or not self.doubtful():
            return None
        draws = ((self.draw_set() & by_step) | (chosen - by_step) for _ in range(_DRAWS))
        return next((drawn for drawn in draws if drawn != chosen), None)

    def prefer(self, on: frozenset[int]) -> None:
        """Settle on a set in place of the chosen one, if it was measured, and surely is faster."""
        chosen = self.chosen()
        if on & set(self.dropped) or all(block.on != on for block in self.posterior.blocks):
            return  # a technique failed in its block, or something else was on in it
        if self.posterior.better(on, chosen) < _SURE_TOGETHER:
            return
        if self.posterior.gain(on)[0] <= self.posterior.gain(chosen)[0] - _WORTH:
            self.settle(on)

    def reopen(self) -> None:
        """Forget the settled set: the search goes on."""
        self._settled = None

    @property
    def settled(self) -> frozenset[int] | None:
        """The settled set, without LAST techniques that failed since. None before, or if another part of it failed."""
        if self._settled is None or (self._settled & set(self.dropped)) - self._last:
            return None
        return self._settled - set(self.dropped)

    def best_measured(self) -> frozenset[int]:
        """Return the first set, finalists before others, that is as fast as the fastest set measured."""
        measured = [block.on for block in self.posterior.blocks if not block.on & (set(self.dropped) | self._last)]
        ran = list(dict.fromkeys([*(on for on in self.finalists() if on in measured), *measured]))
        fastest = min(map(self._upper_estimate, ran), default=0.0)
        return next((on for on in ran if self._upper_estimate(on) <= fastest + AS_GOOD), frozenset())

    def chosen(self) -> frozenset[int]:
        """Return the settled set; before that, the candidates that help as surely as their effect asks."""
        if self._settled is not None:
            return self._without_the_needless(self._settled - set(self.dropped))
        ran = {i for block in self.posterior.blocks for i in block.on}
        return self._sure_enough(self._best(self._expected(), ran - set(self.dropped)))

    def _upper_estimate(self, on: Collection[int]) -> float:
        """Return an upper estimate (mean + standard deviation) of the change of log(seconds per step) with these on."""
        mean, spread = self.posterior.gain(on)
        return mean + spread

    def _without_the_needless(self, on: frozenset[int]) -> frozenset[int]:
        """Return a measured set without the candidates that do not help, as long as the rest is surely no slower."""
        while on:
            unsure = [i for i in on if not self._is_sure(i, self._estimate(i, on), _HARMS)]
            leaves = [i for i in unsure if self._must_be_sure(i) or self._may_leave(i, on)]
            if not leaves:
                break
            on -= {min(leaves, key=lambda i: self._estimate(i, on).helps)}
        return on

    def _may_leave(self, index: int, on: frozenset[int]) -> bool:
        """Return whether a set is no slower without this candidate."""
        # Kernels are compiled for one set of techniques: with another, a run would compile them again.
        if on & self._last - {index}:
            return False
        return self._upper_estimate(on - {index}) <= self._upper_estimate(on) + AS_GOOD

    def _expected(self) -> list[float]:
        effects = self.posterior.means()
        if self._share():
            alone = [self._estimate(i, ()).mean for i in range(len(self.candidates))]
            effects = [*alone, *effects[len(alone) :]]
        return effects

    def _sure_enough(self, best: frozenset[int]) -> frozenset[int]:
        """Return the candidates that surely help: each alone, or as a group if they could not be told apart in time."""
        sure = self._without_the_unsure(best)
        together = self._without_the_unsure(best, _HARMS)
        return together if self.posterior.better(together, sure & together) >= _SURE_TOGETHER else sure

    def _without_the_unsure(self, on: frozenset[int], least: float = 1.0) -> frozenset[int]:
        """Return the set with its least sure candidate removed, again and again, until all that remain are sure."""
        while on:
            weak = [i for i in on if not self._is_sure(i, self._estimate(i, on), least)]
            if not weak:
                break
            on -= {min(weak, key=lambda i: self._estimate(i, on).helps)}
        return on

    def _is_sure(self, index: int, estimate: CandidateEstimate, least: float = 1.0) -> bool:
        """Return whether a candidate helps as surely as its effect asks; `least` suffices if it only rounds."""
        required = _LEAST_SURE[self._effect(index)]
        if not self._must_be_sure(index):
            required = min(required, least)
        return estimate.helps >= required and -estimate.mean >= _WORTH

    def _effect(self, index: int) -> Effect:
        candidate = self.candidates[index]
        return CATALOGUE[candidate.name].effect_of(candidate.setting)

    def _must_be_sure(self, index: int) -> bool:
        """Return whether a candidate changes the result by more than rounding."""
        return self._effect(index) not in (Effect.EXACT, Effect.ROUNDING)

    def doubtful(self) -> list[int]:
        """Return the candidates for which more blocks could still change the choice."""
        return [
            i
            for i, estimate in enumerate(self.estimates())
            if not (
                i in self.dropped or i in self._last or self._is_as_known(i, estimate) or self._is_clear(i, estimate)
            )
        ]

    def prior(self) -> Prior:
        """Return the estimates of everything measured, in this tune or before, as the next tune's prior."""
        ran = {i for block in self.posterior.blocks for i in block.on}
        is_measured = [i in ran or candidate.known is not None for i, candidate in enumerate(self.candidates)]
        is_measured += [is_measured[i] and is_measured[j] for i, j in self.posterior.pairs]
        rows = rows_of(self.candidates, self.posterior.pairs)
        prior = Prior(tuple(rows), tuple(self.posterior.means()), tuple(map(tuple, self.posterior.covariance())))
        return prior.only([row for row, measured in zip(rows, is_measured, strict=True) if measured])

    def _is_clear(self, index: int, estimate: CandidateEstimate) -> bool:
        """Return whether enough is known of a candidate: two blocks with it on and two off, or one without doubt."""
        blocks, doubt = self.posterior.least_blocks(index), min(estimate.helps, 1 - estimate.helps)
        expected, spread = self.posterior.priors[index]
        # A result against expectation, and still uncertain, may really be the effect of other candidates.
        is_its_own = expected * estimate.mean > 0 or estimate.spread < _OF_ITS_OWN * spread
        if blocks >= _LEAST_BLOCKS and is_its_own:
            return doubt < 1 - _SETTLED or abs(estimate.mean) + estimate.spread < 2 * _WORTH
        return blocks >= 1 and doubt < _NO_DOUBT

    def _is_as_known(self, index: int, estimate: CandidateEstimate) -> bool:
        """Return whether an earlier tune measured the candidate, new blocks agree, and that is enough to choose by."""
        earlier = self.candidates[index].known
        if earlier is None or abs(estimate.mean - earlier[0]) > _AGREES * earlier[1]:
            return False
        if estimate.spread < _FINE or estimate.helps < 1 - _LEAST_SURE[Effect.ROUNDING]:
            return True
        return self._is_sure(index, estimate)


def _mixed(step: CandidateEstimate, validation: CandidateEstimate, share: float) -> CandidateEstimate:
    """Return the effect on an epoch's time, of which validation takes `share`."""
    mean = (1 - share) * step.mean + share * validation.mean
    spread = math.hypot((1 - share) * step.spread, share * validation.spread)
    return CandidateEstimate(mean, spread, step.blocks, step.without)
