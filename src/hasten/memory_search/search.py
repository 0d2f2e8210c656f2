"""Find the cheapest plan that fits: plans are tried under the limit, each in a separate process.

First all savings together; if that does not fit, nothing does. Then `_add_until_it_fits` adds savings, cheapest first;
`_drop_unneeded` and `_without_most_expensive` drop those that are not needed; `_fewer_blocks` and `_larger_budget`
recompute less. The result is always a plan that a trial ran within the limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hasten.batch.attempt import Attempt
from hasten.batch.trouble import below_torch, what_holds_it
from hasten.errors import HastenError, script_fails
from hasten.memory_search import knapsack
from hasten.memory_search.limit import Limit
from hasten.memory_search.savings import BUDGETS, Saving, acted, blocks_in, clash, compile_setting, in_order, left_alone
from hasten.plan import Setting
from hasten.techniques import toml_value

_SLOWER = 1.05  # bf16 that is not needed for memory stays if a step without it takes more than so many times as long
_MOST_TRIALS = 5  # of sets of blocks
_NOT_ENOUGH = "it is not enough"
_COARSE = 64  # the search of blocks stops at 1/64 of what all blocks hold

Techniques = dict[str, Setting]


class Plans(Protocol):
    """Trains some steps under a plan; implemented by `hasten.batch.attempt.Attempts`."""

    def run(self, *, plan: Mapping[str, Setting]) -> Attempt:
        """Run one attempt under the limit."""
        ...


@dataclass(frozen=True)
class PlanTrial:
    """One plan that was tried.

    Attributes:
        plan: Technique -> setting; empty: the unchanged script.
        attempt: The result of the trial.
        predicted: Predicted peak in bytes; 0: there was no prediction.
    """

    plan: Techniques
    attempt: Attempt
    predicted: int = 0

    @property
    def fits(self) -> bool:
        """Whether it trained within the limit."""
        return self.attempt.outcome == "ok"

    @property
    def peak(self) -> int:
        """Peak memory in bytes, including the time before training."""
        return max(self.attempt.peak, self.attempt.before)


@dataclass
class SearchResult:
    """The result of the search.

    Attributes:
        limit: The training's memory limit.
        tries: All tries, in order; the first is the unchanged script.
        chosen: The cheapest try that fits.
        excluded: Techniques that were left out -> reason.
        unexamined: What was not examined, for lack of time or after Ctrl-C.
        interrupted: Whether Ctrl-C ended the search; `chosen` is then the best so far.
    """

    limit: Limit
    tries: list[PlanTrial]
    chosen: PlanTrial
    excluded: dict[str, str] = field(default_factory=dict)
    unexamined: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def plain(self) -> PlanTrial:
        """The try of the unchanged script."""
        return self.tries[0]

    def without(self, name: str) -> PlanTrial | None:
        """Return the try of the chosen plan without a technique, or of a larger plan without it that did not fit."""
        remaining = {other: setting for other, setting in self.chosen.plan.items() if other != name}
        return next(
            (tried for tried in self.tries if settings_of(tried.plan) == settings_of(remaining)), None
        ) or cannot_fit(remaining, self.tries)


def find_plan(
    plans: Plans,
    limit: Limit,
    savings: Sequence[Saving],
    say: Callable[[str], None],
    until: float = float("inf"),
    ran_out: str = "",
) -> SearchResult:
    """Find the cheapest plan under which a training fits.

    See the module's docstring for the order of the trials.

    Args:
        plans: Runs the trials.
        limit: The training's memory limit.
        savings: Techniques that lower memory, cheapest first.
        say: Receives a line for each trial.
        until: Time on the monotonic clock at which the search ends; the result names what was not examined by then.
        ran_out: How the unchanged script ran out of memory, if that is known already; "": it is tried.

    Raises:
        HastenError: The script itself fails, or fits under no plan.
    """
    search = _PlanSearch(plans, limit, savings, say, until)
    return search.run(PlanTrial({}, Attempt(0, "out of memory", reason=ran_out)) if ran_out else None)


class _OutOfTime(Exception):  # noqa: N818 - no error: the time is over
    """Raised when there is no time for another trial."""


class _PlanSearch:
    """State and steps of one search. `_spare` savings may replace one of `_savings` if all those are not enough."""

    def __init__(
        self, plans: Plans, limit: Limit, savings: Sequence[Saving], say: Callable[[str], None], until: float
    ) -> None:
        self._plans, self._limit, self._say, self._until = plans, limit, say, until
        names = {saving.name for saving in savings}
        self._all_savings = list(savings)
        self._spare = [saving for saving in savings if saving.instead_of in names]
        self._savings = [saving for saving in savings if saving not in self._spare]
        self._tries: list[PlanTrial] = []
        self._excluded: dict[str, str] = {}
        self._longest = 0.0

    def run(self, plain: PlanTrial | None) -> SearchResult:
        """Search; `plain` is the unchanged script's try if its outcome is known."""
        if plain is None:
            plain = self._try({})
        else:
            self._tries.append(plain)
        if plain.fits:
            return SearchResult(self._limit, self._tries, plain)
        if too_little := below_torch(plain.attempt, self._limit.room, self._limit.words):
            raise too_little
        if plain.attempt.outcome == "timeout":
            raise HastenError("the script did not start to train within a trial's time", "give it a longer --budget")
        if plain.attempt.outcome != "out of memory":
            raise script_fails(plain.attempt.reason, "")
        best = self._all()
        unexamined: list[str] = []
        interrupted = False
        try:
            best = self._add_until_it_fits(best)
            best = self._drop_unneeded(best)
            best = self._without_most_expensive(best)
            best = self._fewer_blocks(best)
            best = self._larger_budget(best)
        except _OutOfTime:
            best = self._cheapest()
            unexamined.append("whether a cheaper plan fits, for want of time: give it a longer --budget")
        except KeyboardInterrupt:
            best, interrupted = self._cheapest(), True
            unexamined.append("whether a cheaper plan fits: stopped by Ctrl-C")
        return SearchResult(self._limit, self._tries, best, self._excluded, unexamined, interrupted)

    # -- trials --------------------------------------------------------------------------------------------

    def _try(self, techniques: Techniques, predicted: int = 0, in_any_case: bool = False) -> PlanTrial:
        """Run a plan under the limit, or return its earlier try.

        Raises:
            _Late: A trial as long as the longest so far would end too late (not with `in_any_case`).
        """
        plan = in_order(techniques)
        earlier = [tried for tried in self._tries if settings_of(tried.plan) == settings_of(plan)]
        if earlier:
            return earlier[0]
        started_at = time.monotonic()
        if self._tries and not in_any_case and started_at + self._longest > self._until:
            raise _OutOfTime
        attempt = self._plans.run(plan=plan)
        self._longest = max(self._longest, time.monotonic() - started_at)
        tried = PlanTrial(plan, _judged_by_limit(attempt, self._limit), predicted)
        self._tries.append(tried)
        self._say(f"{in_words(plan)}: {came_to(tried)}")
        return tried

    def _cheapest(self) -> PlanTrial:
        """Return the cheapest try so far, without techniques that act on nothing."""
        fitting = [tried for tried in self._tries if tried.fits]
        needed = [tried for tried in fitting if not any(_is_lighter(other, tried) for other in fitting)]
        cheapest = min(needed, key=lambda tried: tried.attempt.seconds)
        acts = {name: setting for name, setting in cheapest.plan.items() if name not in self._excluded}
        return PlanTrial(acts, cheapest.attempt, cheapest.predicted)

    # -- all of them ---------------------------------------------------------------------------------------

    def _all(self) -> PlanTrial:
        """Try all savings together; exclude those that fail, and keep those that act.

        Raises:
            HastenError: The training does not fit even so.
        """
        while self._savings:
            tried = self._try({saving.name: saving.setting for saving in self._savings}, in_any_case=True)
            if tried.fits:
                self._excluded |= left_alone(tried.plan, tried.attempt)
                acts = acted(tried.plan, tried.attempt)
                self._savings = [saving for saving in self._savings if saving.name in acts]
                return tried
            if tried.attempt.outcome == "out of memory":
                without = {saving.name: saving.setting for saving in self._savings if saving.name != "precision"}
                # bf16 casts of many weights may take more memory than 16-bit activations save.
                if len(without) < len(self._savings) and self._try(without, in_any_case=True).fits:
                    self._exclude("precision", "it takes more memory than it saves here")
                elif self._spare:
                    self._replace_by(self._spare[0])
                else:
                    break
                continue
            name, why = self._culprit(tried), tried.attempt.reason or tried.attempt.outcome
            self._exclude(name, why.partition(f"hasten: {name}: ")[2] or why)
        raise self._fits_under_no_plan()

    def _culprit(self, tried: PlanTrial) -> str:
        """Return the technique that failed: named in the error, or changing most; for a timeout, the most expensive."""
        if tried.attempt.outcome == "timeout":
            return self._savings[-1].name
        by_name = next((name for name in tried.plan if f"hasten: {name}:" in tried.attempt.reason), "")
        return by_name or next(name for name in reversed(_BY_CHANGE) if name in tried.plan)

    def _exclude(self, name: str, why: str) -> None:
        """Leave a technique out; spare savings that replace it come into use."""
        self._excluded[name] = why
        free = [saving for saving in self._spare if saving.instead_of == name]
        self._spare = [saving for saving in self._spare if saving not in free]
        self._savings = [saving for saving in self._savings if saving.name != name] + free

    def _replace_by(self, spare: Saving) -> None:
        """Use a spare saving instead of the one it replaces and of those it clashes with.

        Savings that the clashing ones had replaced come back, unless they were excluded because they fail.
        """
        clashing = [saving for saving in self._savings if saving.name != spare.instead_of and clash(saving, spare)]
        for name in (spare.instead_of, *(saving.name for saving in clashing)):
            self._exclude(name, f"{_NOT_ENOUGH}: {spare.name} was tried in its place")
        for name in [saving.instead_of for saving in clashing]:
            if self._excluded.get(name, "").startswith(_NOT_ENOUGH):
                del self._excluded[name]
                self._savings += [saving for saving in self._all_savings if saving.name == name]
        self._savings.sort(key=self._all_savings.index)

    def _fits_under_no_plan(self) -> HastenError:
        """Return the error that the training fits under no plan."""
        ran_out = [tried for tried in self._tries if tried.attempt.outcome == "out of memory"]
        most = max(ran_out, key=lambda tried: len(tried.plan))
        lines = [f"the training does not fit into {self._limit.words}, not even under {in_words(most.plan)}"]
        lines += what_holds_it(most.attempt)
        lines += [f"{name} was left out: {why}" for name, why in self._excluded.items()]
        return HastenError(
            "\n".join(lines),
            "allow more memory, or make the model or the script's batch smaller",
        )

    # -- the cheapest of them ------------------------------------------------------------------------------

    def _add_until_it_fits(self, best: PlanTrial) -> PlanTrial:
        """Add one saving after the other, cheapest first, until the training fits."""
        for count in range(1, len(self._savings)):
            tried = self._try({saving.name: saving.setting for saving in self._savings[:count]})
            if tried.fits:
                return tried
        return self._try({saving.name: saving.setting for saving in self._savings}) if self._savings else best

    def _drop_unneeded(self, best: PlanTrial) -> PlanTrial:
        """Drop each technique that is not needed, most expensive first. bf16 stays if it makes steps shorter."""
        for name in [saving.name for saving in reversed(self._savings) if saving.name in best.plan]:
            remaining = {other: setting for other, setting in best.plan.items() if other != name}
            if cannot_fit(remaining, self._tries):
                continue
            tried = self._try(remaining)
            # Only bf16 is judged by time: the others never make steps shorter, whatever a busy machine shows.
            if tried.fits and (name != "precision" or tried.attempt.seconds <= _SLOWER * best.attempt.seconds):
                best = tried
        return best

    def _without_most_expensive(self, best: PlanTrial) -> PlanTrial:
        """Try savings ranked above the plan's most expensive one in its place: here they may be the cheaper ones."""
        dearest = next((saving for saving in reversed(self._savings) if saving.name in best.plan), None)
        if dearest is None or dearest is self._savings[-1]:
            return best
        tried = self._try({saving.name: saving.setting for saving in self._savings if saving is not dearest})
        if not tried.fits:
            return best
        tried = self._drop_unneeded(tried)
        return min(best, tried, key=lambda trial: trial.attempt.seconds)

    def _fewer_blocks(self, best: PlanTrial) -> PlanTrial:
        """Recompute only the blocks that the knapsack chooses.

        Trials show how many bytes the other blocks may keep together. The first trial lets them keep all that the
        backward leaves room for. If the end of the forward needs more memory than that (large logits), the next allows
        what is left below the limit with all blocks recomputed; further trials bisect between what fitted and what
        did not.
        """
        name, blocks = "activation_checkpointing", best.attempt.blocks
        if best.plan.get(name) is not True or len(blocks) < 2:
            return best
        count, least, fits = blocks_in(best.attempt), best.peak, frozenset(range(len(blocks)))
        spare = self._limit.room - least
        low, high = (
            0,
            knapsack.kept_bytes(blocks, ()),
        )  # keeping all does not fit, or the plan would not need the technique
        most_kept, grain, trials = spare + knapsack.largest(blocks), max(1, high // _COARSE), 0
        while trials < _MOST_TRIALS and high - low > grain:
            most_kept = min(max(most_kept, low), high - 1)
            recomputed = knapsack.blocks_to_recompute(blocks, spare, most_kept)
            if knapsack.recompute_seconds(blocks, recomputed) >= knapsack.recompute_seconds(blocks, fits):
                low, most_kept = most_kept, (most_kept + high) // 2 + 1  # nothing cheaper up to there: no trial needed
                continue
            trials += 1
            predicted = least + knapsack.extra_peak_bytes(blocks, recomputed)
            tried = self._try({**best.plan, name: knapsack.as_setting(blocks, recomputed, count)}, predicted)
            if tried.fits:
                best, fits, low = tried, recomputed, knapsack.kept_bytes(blocks, recomputed)
                spare += max(0, predicted - tried.peak)
                most_kept = low + self._limit.room - tried.peak
            else:
                high = knapsack.kept_bytes(blocks, recomputed)
                most_kept = spare if low < spare < high else (low + high) // 2
        return best

    def _larger_budget(self, best: PlanTrial) -> PlanTrial:
        """Let compiled models keep the largest share of their activations that fits."""
        if "compile" not in best.plan:
            return best
        for budget in reversed(BUDGETS[1:]):  # all of them, since a larger budget may have the smaller peak
            tried = self._try({**best.plan, "compile": compile_setting(budget)})
            if tried.fits:
                return tried
        return best


_BY_CHANGE = (
    "no_grad_validation", "allocator", "chunked_loss", "precision", "activation_offload", "activation_checkpointing",
    "optimizer_in_backward", "compile", "host_embeddings",
)  # fmt: skip
"""Techniques from the one that changes the training least to the one that changes it most."""


def _is_lighter(smaller: PlanTrial, larger: PlanTrial) -> bool:
    """Return whether a plan is a proper part of another, and both or neither use `precision`."""
    is_part = settings_of(smaller.plan) < settings_of(larger.plan)
    return is_part and ("precision" in smaller.plan) == ("precision" in larger.plan)


def settings_of(plan: Mapping[str, Setting]) -> frozenset[tuple[str, str]]:
    """Return a plan's settings as written in a plan file, for comparisons: in Python, `True` equals 1 (block)."""
    return frozenset((name, toml_value(setting)) for name, setting in plan.items())


def cannot_fit(plan: Techniques, tries: Sequence[PlanTrial]) -> PlanTrial | None:
    """Return a try of a larger plan that includes this one and did not fit, so that this one cannot; None without one.

    Plans that differ in `precision` are not compared: bf16 casts of many weights may take more than activations save.
    """
    for tried in tries:
        if _is_lighter(PlanTrial(plan, tried.attempt), tried) and tried.attempt.outcome == "out of memory":
            return tried
    return None


def _judged_by_limit(attempt: Attempt, limit: Limit) -> Attempt:
    """Return the attempt, as "out of memory" if its exact peak exceeded the room; the guard's polling may miss that."""
    peak = max(attempt.peak, attempt.before)
    if attempt.outcome != "ok" or attempt.device == "cuda" or peak <= limit.room:
        return attempt
    return Attempt(**{**vars(attempt), "outcome": "out of memory", "reason": f"{peak / 1e9:.2f} GB at its peak"})


def in_words(plan: Mapping[str, Setting]) -> str:
    """Format a plan in one line."""
    return ", ".join(f"{name} = {toml_value(setting)}" for name, setting in plan.items()) or "the script as it is"


def came_to(tried: PlanTrial) -> str:
    """Format the result of a try: its peak and time, or how it failed."""
    if tried.fits:
        return f"{tried.peak / 1e6:.0f} MB, {tried.attempt.seconds * 1e3:.1f} ms a step"
    return f"{tried.attempt.outcome} ({tried.attempt.reason})" if tried.attempt.reason else tried.attempt.outcome
