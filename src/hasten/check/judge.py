"""Judge measured differences: does a plan's run stay within the script's own rounding? No torch.

Plain runs under noise show how far rounding moves each tensor. A plan's tensor may differ by a multiple of that. A
gradient that is longer or shorter in every step, by more than chance explains, is a difference too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from hasten.check.agreement import Agreement, agreement_of
from hasten.plan import Setting
from hasten.techniques import CATALOGUE, Effect

SINGLE = 2.0**-23
"""Relative size of the noise that stands for other orders of float32 sums: one unit in the last place."""
MOST_SINGLE = 2.0**-16
"""Roundoff up to which a technique computes in single precision, if in less careful sums; above it are 16-bit types."""

# Calibrated on convolutional, recurrent and attention models under bf16, channels_last, fused optimizers and compile
# (benchmarks/exactness.py): legitimate rounding stays below 3.1 times the noise of its roundoff, but for channels_last
# on a CPU without AVX-512 (6.5 times, in `make demo`); planted defects are from 10 times on.
TIMES, _TIMES_16_BITS = 9.0, 6.0
# A tensor that noise moves by so much of its norm consists of rounding errors: the gradient of a bias before a
# BatchNorm. Meaningful gradients move by at most 0.1 % in single precision, and by a fifth in 16 bits. A weight in
# which one sign of sixteen flips in Adam's first step moves by half, and is meaningful all the same.
_ALL_NOISE, _ALL_NOISE_16_BITS = 0.1, 0.5
_TIMES_ALL_NOISE = 100.0
_SUMS = 2.0**10  # units of rounding by which a sum over a whole batch may be off where noise does not reach: 0.01 %
_MOST = 1e9  # share of its bound for a difference whose bound is 0
_SLACK = 1.5  # factor on what strong noise has shown: the plan may flip two elements where noise flipped one
_TILTS = 3.0  # standard deviations that a systematic change of a gradient must exceed

_ORDER = (Effect.EXACT, Effect.ROUNDING, Effect.SAMPLING, Effect.TRAJECTORY)


@dataclass(frozen=True)
class Difference:
    """A difference between a run and the plain run.

    Attributes:
        place: The moment: "optimizer step 3".
        what: The tensor, sample or random state.
        how: The difference in words.
        size: Norm of the difference over the norm of the plain tensor; None if it was not measured.
        bound: Largest value of `size` that rounding explains.
    """

    place: str
    what: str
    how: str
    size: float | None = None
    bound: float | None = None


@dataclass(frozen=True)
class RunComparison:
    """Comparison of a run under some techniques with the plain run.

    Attributes:
        plan: Technique -> setting.
        level: The promise it was held to: "exact", "rounding" or "sampling".
        ok: Whether it was kept; None if that could not be found out (`note` says why).
        first: The first difference that breaks the promise.
        moved: Random streams that drew other numbers -> place of the first difference.
        counts: Number of batches, optimizer steps and validation forwards compared.
        worst: The largest difference as a share of its bound: 0.0 to 1.0 if the promise was kept.
        worst_at: Name and place of that difference.
        sees: The smallest systematic change of a typical gradient that would have been noticed; 0.0 for any change.
        note: Why `ok` is None.
        agreed: Agreement of losses and gradients on the same weights and batches; None if the run ended at a difference
            before that could be measured.
    """

    plan: Mapping[str, Setting]
    level: str
    ok: bool | None
    first: Difference | None = None
    moved: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    worst: float = 0.0
    worst_at: str = ""
    sees: float = 0.0
    note: str = ""
    agreed: Agreement | None = None


def level_of(plan: Mapping[str, Setting]) -> Effect:
    """Return the strongest effect of a plan's techniques."""
    effects = [CATALOGUE[name].effect_of(setting) for name, setting in plan.items() if setting is not False]
    return max(effects, key=_ORDER.index, default=Effect.EXACT)


def roundoff_of(plan: Mapping[str, Setting]) -> float:
    """Return the relative rounding error of the narrowest dtype that a plan computes in."""
    return max((CATALOGUE[name].roundoff(setting) for name, setting in plan.items()), default=SINGLE)


def parts_of(plan: Mapping[str, Setting]) -> list[tuple[dict[str, Setting], Effect]]:
    """Return the parts of a plan to check, each with the promise it is held to, the strictest first."""
    plan = {name: setting for name, setting in plan.items() if setting is not False}

    def subset(keeps: Callable[[str, Setting], bool]) -> dict[str, Setting]:
        return {name: setting for name, setting in plan.items() if keeps(name, setting)}

    def is_in(*effects: Effect) -> Callable[[str, Setting], bool]:
        return lambda name, setting: CATALOGUE[name].effect_of(setting) in effects

    rounds = is_in(Effect.EXACT, Effect.ROUNDING)
    candidates = [
        (subset(is_in(Effect.EXACT)), Effect.EXACT),
        (subset(lambda n, s: rounds(n, s) and CATALOGUE[n].roundoff(s) <= MOST_SINGLE), Effect.ROUNDING),
        (subset(rounds), Effect.ROUNDING),
        (subset(is_in(Effect.EXACT, Effect.ROUNDING, Effect.SAMPLING)), Effect.SAMPLING),
    ]
    parts: list[tuple[dict[str, Setting], Effect]] = []
    for techniques, level in candidates:
        if techniques and all(techniques != earlier for earlier, _ in parts):
            parts.append((techniques, level))
    return parts


def judge_run(
    plan: Mapping[str, Setting],
    level: Effect,
    result: Mapping[str, Any],
    noise: Sequence[Any],
    *,
    strong: Sequence[Any] = (),
    other_start: bool = False,
) -> RunComparison:
    """Judge a witness's result.

    Args:
        plan: Techniques of the run.
        level: The promise that it is held to.
        result: The witness's result.
        noise: Results of plain runs under noise of the plan's roundoff; not needed for "exact".
        strong: Results of plain runs under noise `TIMES` as large. A plan's tensor may move as far as they do.
        other_start: The run resumed from weights that differ by rounding, so the weights before its first step do not
            count.
    """
    common = {"plan": dict(plan), "level": str(level), "moved": result["moved"], "counts": result["counts"]}
    if result["failed"]:
        return RunComparison(**common, ok=None, note=f"the check itself did not work here: {result['failed']}")
    if result["first"] is not None:
        return RunComparison(**common, ok=False, first=Difference(**result["first"]))
    if level is Effect.EXACT:
        return RunComparison(**common, ok=True, agreed=Agreement(result["counts"]["step"]))
    table = _Noise(noise, strong, roundoff_of(plan))
    worst, worst_at, first = 0.0, "", None
    first_step = next((moment for moment in result["measured"] if moment["kind"] == "step"), None)
    for moment in result["measured"]:
        for name, (apart, size, _, whole_norm) in moment["apart"].items():
            if other_start and moment is first_step and name.startswith("weight before"):
                continue
            bound = table.bound(name, size, whole_norm)
            share = min(apart / bound, _MOST) if bound > 0 else _MOST if apart > 0 else 0.0
            if share > worst:
                worst, worst_at = share, f"{name}, {moment['place']}"
            if share > 1 and first is None:
                first = _difference(moment["place"], name, apart, bound, size)
    first = first or table.tilted(result["measured"])
    note = (
        ""
        if table.steps or not result["measured"]
        else "the script could not be run under noise: nothing to hold it to"
    )
    ok = None if note else first is None
    agreement = None if note else _agreement(result["measured"], table, first)
    return RunComparison(
        **common, ok=ok, first=first, worst=worst, worst_at=worst_at, sees=table.sees(), note=note, agreed=agreement
    )


def _agreement(measured: Sequence[Any], table: _Noise, first: Difference | None) -> Agreement | None:
    agreement = agreement_of(measured, table.bound, table.moved)
    if agreement is None or first is None or first.size is None or not first.what.startswith("gradient: "):
        return agreement
    # Name the gradient that broke the promise, whether in one step or over all of them.
    return replace(agreement, gradient_gap=first.size, worst=first.what.removeprefix("gradient: "), allowed=first.bound)


def _difference(place: str, what: str, apart: float, bound: float, size: float) -> Difference:
    if not math.isfinite(apart):
        return Difference(place, what, "NaN or infinite, or of another shape, on one side only")
    if size > 0:
        how = f"off by {apart / size:.2g} of its size; the script's own rounding allows {bound / size:.2g}"
        return Difference(place, what, how, apart / size, bound / size)
    return Difference(place, what, f"is {apart:.2g}, and 0 without the plan; rounding allows {bound:.2g}")


class _Moved:
    """How far runs under noise moved each tensor, by name.

    Attributes:
        most: Norm of the largest difference.
        share: The same as a share of the tensor's norm.
        along: For each gradient and run, its relative change of length in each step.
    """

    def __init__(self, results: Sequence[Any]) -> None:
        self.most: dict[str, float] = {}
        self.share: dict[str, float] = {}
        self.along: dict[str, list[list[float]]] = {}
        for result in results:
            for moment in result["measured"]:
                for name, (apart, size, _, _) in moment["apart"].items():
                    self.most[name] = max(self.most.get(name, 0.0), apart)
                    if size > 0:
                        self.share[name] = max(self.share.get(name, 0.0), apart / size)
            for name, shares in _along(result["measured"]).items():
                self.along.setdefault(name, []).append(shares)


class _Noise:
    """Bounds of the differences that rounding explains, from runs under noise."""

    def __init__(self, results: Sequence[Any], strong: Sequence[Any], roundoff: float) -> None:
        self.steps = sum(moment["kind"] == "step" for result in results for moment in result["measured"])
        self._roundoff = roundoff
        self._times = TIMES if roundoff <= MOST_SINGLE else _TIMES_16_BITS
        self._single = roundoff <= MOST_SINGLE
        self._usual, self._strong = _Moved(results), _Moved(strong)

    def bound(self, name: str, size: float, whole_norm: float) -> float:
        """Return the largest norm that a difference may have."""
        share = self.moved(name)
        times = self._times
        if self._is_all_noise(name):  # Adam's second moment is its square
            times = _TIMES_ALL_NOISE**2 if name.startswith("optimizer state") else _TIMES_ALL_NOISE
        # A weight moves by whole units in its last place, however small the step was.
        least = max(_SUMS * SINGLE * size, 8 * SINGLE * whole_norm if name.startswith("weight") else 0.0)
        strong_bound = _SLACK * max(self._strong.share.get(name, 0.0) * size, self._strong.most.get(name, 0.0))
        return max(times * share * size, times * self._usual.most.get(name, 0.0), strong_bound, least)

    def moved(self, name: str) -> float:
        """Return the share of its norm by which noise moves a tensor."""
        return self._usual.share.get(name, 0.0)

    def _is_all_noise(self, name: str) -> bool:
        """Return whether a tensor consists of rounding errors."""
        narrow = not self._single or name.startswith("weight")
        return self.moved(name) > (_ALL_NOISE_16_BITS if narrow else _ALL_NOISE)

    def _tilt_bound(self, name: str) -> float:
        along = list(chain.from_iterable(self._usual.along.get(name, [[0.0]])))
        least = max(_SUMS * SINGLE, self._roundoff / 2)  # a weight that hardly changes is rounded alike in each step
        chance = _TILTS * math.sqrt(statistics.fmean(value**2 for value in along)) + least
        tilts = (abs(statistics.fmean(shares)) for shares in self._strong.along.get(name, ()))
        return max(chance, _SLACK * max(tilts, default=0.0))

    def tilted(self, measured: Iterable[Any]) -> Difference | None:
        """Return the first gradient that is longer or shorter on average by more than chance explains; else None."""
        for name, shares in _along(measured).items():
            mean, bound = statistics.fmean(shares), self._tilt_bound(name)
            # Errors of sums in another order may be longer in each step, and mean nothing.
            if len(shares) >= 4 and abs(mean) > bound and not self._is_all_noise(name):
                change = f"is {'longer' if mean > 0 else 'shorter'} by {abs(mean):.2%}"
                how = f"{change} over {len(shares)} steps; chance allows {bound:.2%} more or less"
                return Difference("all steps", name, how, abs(mean), bound)
        return None

    def sees(self) -> float:
        """Return the smallest systematic change that would be noticed in half of the gradients."""
        bounds = [self._tilt_bound(name) for name in self._usual.along if name.startswith("gradient")]
        return statistics.median(bounds) if bounds else 0.0


def _along(measured: Iterable[Any]) -> dict[str, list[float]]:
    """Return for each gradient its relative change of length, step by step."""
    along: dict[str, list[float]] = {}
    for moment in measured:
        for name, (_, size, share, _) in moment["apart"].items():
            if name.startswith("gradient") and size > 0:
                along.setdefault(name, []).append(share)
    return along
