"""The course of a search: what is on in the next block, and which techniques are chosen at its end. No torch.

All that applies is on from the start; then each block has on what a draw from the posterior takes to help (Thompson
sampling), so that what is doubtful is asked most, and what is clear soon no more. Choosing is not claiming: the
claim is measured afterwards, on blocks of its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Sequence

from hasten.techniques import CATALOGUE, Effect, Liveness
from hasten.warm.options import Candidate
from hasten.warm.posterior import Estimate, Posterior

_LEAST_SURE = {Effect.EXACT: 0.6, Effect.ROUNDING: 0.8, Effect.SAMPLING: 0.95, Effect.TRAJECTORY: 0.95}
_WORTH = 0.004  # of log(seconds per step): less is not worth a line in a plan
_SETTLED = 0.97  # a technique this sure to help, or not to, is asked no more
_LEAST_BLOCKS = 2  # on and off, before anything is settled


class Course:
    """One search.

    Args:
        candidates: What may be on.
        seed: Of the draws.
        careful: Add what never ran before one by one, since a process crashed.
        validation_share: Share of an epoch's time that validation takes, from 0 to 1.
        live: Whether techniques are switched while the training runs: what comes last then has a part of its own.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        seed: int = 0,
        careful: bool = False,
        validation_share: float = 0.0,
        live: bool = True,
    ) -> None:
        self.candidates = list(candidates)
        self.posterior = Posterior([(one.mean, one.spread) for one in candidates])
        self.validation = Posterior([(one.mean, one.spread) for one in candidates])
        self._validation_share = validation_share
        self.out: dict[int, str] = {}  # off for good, and why
        self.careful = careful
        self._lot = random.Random(seed)
        self._last = self.of(Liveness.LAST) if live else set()

    def liveness(self, index: int) -> Liveness:
        """When this candidate can be switched."""
        one = self.candidates[index]
        return CATALOGUE[one.name].liveness_of(one.setting)

    def of(self, liveness: Liveness) -> set[int]:
        """The candidates that are switched at such a moment."""
        return {i for i in range(len(self.candidates)) if self.liveness(i) is liveness}

    def saw(self, on: Collection[int], seconds: float, process: int = 0) -> None:
        """A block was measured."""
        self.posterior.add(on, seconds, process)

    def saw_validation(self, on: Collection[int], seconds: float, process: int = 0) -> None:
        """A pass of validation took so many seconds a batch."""
        if seconds > 0:
            self.validation.add(on, seconds, process)

    def drop(self, indices: Iterable[int], reason: str) -> None:
        """These crash, hang or spoil the training: off for good."""
        for index in indices:
            self.out.setdefault(index, reason)

    # -- what is on next -----------------------------------------------------------------------------------

    def all_on(self) -> frozenset[int]:
        """All that is expected to help, the best setting of each technique."""
        return self._proven_first([prior[0] for prior in self.posterior.priors])

    def wants(self) -> frozenset[int]:
        """What a draw from the posterior takes to help."""
        return self._proven_first(self.drawn())

    def drawn(self) -> list[float]:
        """Draw every candidate's effect, as likely as it is."""
        effects, share = self.posterior.draw(self._lot), self._validation_share
        if not share or not self.validation.seen:
            return effects
        others = self.validation.draw(self._lot)
        return [(1 - share) * step + share * other for step, other in zip(effects, others, strict=True)]

    def _proven_first(self, effects: Sequence[float]) -> frozenset[int]:
        on = self._best_of_each(effects)
        if not self.careful:
            return on
        ran = set().union(*(block.on for block in self.posterior.seen))
        new = sorted(on - ran, key=lambda i: effects[i])
        return frozenset((on & ran) | set(new[:1]))

    def _best_of_each(self, effects: Sequence[float], allowed: Collection[int] | None = None) -> frozenset[int]:
        best: dict[str, int] = {}
        for index, one in enumerate(self.candidates):
            if index in self.out or effects[index] >= 0:
                continue
            if index in self._last if allowed is None else index not in allowed:
                continue
            if one.name not in best or effects[index] < effects[best[one.name]]:
                best[one.name] = index
        return frozenset(best.values())

    # -- what is chosen ------------------------------------------------------------------------------------

    def estimates(self) -> list[Estimate]:
        """What is known of each candidate: what it does to a step and, by its share of the time, to validation."""
        found, share = self.posterior.estimates(), self._validation_share
        if not share or not self.validation.seen:
            return found
        return [_mixed(step, other, share) for step, other in zip(found, self.validation.estimates(), strict=True)]

    def sure_enough(self, index: int) -> bool:
        """Whether it helps with the certainty that its effect on the result asks for."""
        one, found = self.candidates[index], self.estimates()[index]
        least = _LEAST_SURE[CATALOGUE[one.name].effect_of(one.setting)]
        return found.helps >= least and -found.mean >= _WORTH and found.blocks > 0

    def chosen(self) -> frozenset[int]:
        """What helps, the best setting of each technique."""
        found = [one.mean for one in self.estimates()]
        sure = {i for i in range(len(self.candidates)) if self.sure_enough(i)}
        return self._best_of_each(found, sure)

    def doubtful(self) -> list[int]:
        """Of which more blocks could still change the choice."""
        return [
            i
            for i, one in enumerate(self.estimates())
            if i not in self.out
            and i not in self._last
            and (
                min(one.blocks, one.without) < _LEAST_BLOCKS
                or not (one.helps > _SETTLED or one.helps < 1 - _SETTLED or abs(one.mean) + one.spread < 2 * _WORTH)
            )
        ]


def _mixed(step: Estimate, validation: Estimate, share: float) -> Estimate:
    """What is known of the time of an epoch of which validation takes a share."""
    mean = (1 - share) * step.mean + share * validation.mean
    spread = math.hypot((1 - share) * step.spread, share * validation.spread)
    return Estimate(mean, spread, step.blocks, step.without)
