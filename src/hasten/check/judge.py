"""Judges measured differences: whether a plan's run stays within the script's own rounding. No torch."""

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

# Calibrated on convolutional, recurrent and attention models under bf16, channels_last, fused optimizers and compile
# (benchmarks/exactness.py): legitimate rounding stays below 3.1 times the noise, but for a BatchNorm's weight under
# channels_last (7.8 times, of a sum over 64 images); planted defects are from 10 times on.
TIMES, _TIMES_16_BITS = 9.0, 6.0
# A tensor that noise moves by so much of its size holds nothing else: a bias in front of a BatchNorm. Gradients that
# mean something move by 0.1 % at the most in single precision; in 16 bits, by a fifth. A weight in which one sign of
# sixteen turns in Adam's first step has moved by half and means something all the same.
_ALL_NOISE, _ALL_NOISE_16_BITS = 0.1, 0.5
_TIMES_ALL_NOISE = 100.0
_SUMS = 2.0**10  # units of rounding that a sum over a whole batch may be off, of what noise does not reach: 0.01 %
_MOST = 1e9  # times its bound, for what has none
_SLACK = 1.5  # two of what turns on a rounding error, where strong noise has shown one
_TILTS = 3.0  # standard deviations that a systematic change of a gradient must exceed

_ORDER = (Effect.EXACT, Effect.ROUNDING, Effect.SAMPLING, Effect.TRAJECTORY)


@dataclass(frozen=True)
class Difference:
    """Where a run parts from the plain one.

    Attributes:
        place: The moment: "optimizer step 3".
        what: The tensor, sample or random state.
        how: In words.
        size: Norm of the difference over that of the plain tensor, where it was measured.
        bound: How large it might have been.
    """

    place: str
    what: str
    how: str
    size: float | None = None
    bound: float | None = None


@dataclass(frozen=True)
class Compared:
    """A run under some techniques, held against the plain one.

    Attributes:
        plan: Technique -> setting.
        level: What it had to fulfil: "exact", "rounding" or "sampling".
        ok: Whether it did; None where that could not be found out, for the reason in `note`.
        first: The first difference, if there is one that matters.
        moved: Random streams that drew otherwise, and where first.
        counts: Batches, optimizer steps and validation forwards compared.
        worst: The greatest difference as a share of its bound, 0.0 to 1.0 where all is well.
        worst_at: What that was, and where.
        sees: The smallest systematic change of a typical gradient that would have been noticed; 0.0: any.
        note: Why `ok` is None.
        agreed: How closely losses and gradients agree on the same weights and batches; None where the run parted
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
    """Return the relative rounding error of the narrowest number type that a plan computes in."""
    return max((CATALOGUE[name].roundoff(setting) for name, setting in plan.items()), default=SINGLE)


def parts_of(plan: Mapping[str, Setting]) -> list[tuple[dict[str, Setting], Effect]]:
    """Return the parts of a plan that are checked, each with the level it must fulfil, the strictest first."""
    plan = {name: setting for name, setting in plan.items() if setting is not False}

    def part(keeps: Callable[[str, Setting], bool]) -> dict[str, Setting]:
        return {name: setting for name, setting in plan.items() if keeps(name, setting)}

    def is_in(*effects: Effect) -> Callable[[str, Setting], bool]:
        return lambda name, setting: CATALOGUE[name].effect_of(setting) in effects

    rounds = is_in(Effect.EXACT, Effect.ROUNDING)
    candidates = [
        (part(is_in(Effect.EXACT)), Effect.EXACT),
        (part(lambda n, s: rounds(n, s) and CATALOGUE[n].roundoff(s) <= SINGLE), Effect.ROUNDING),
        (part(rounds), Effect.ROUNDING),
        (part(is_in(Effect.EXACT, Effect.ROUNDING, Effect.SAMPLING)), Effect.SAMPLING),
    ]
    found: list[tuple[dict[str, Setting], Effect]] = []
    for techniques, level in candidates:
        if techniques and all(techniques != known for known, _ in found):
            found.append((techniques, level))
    return found


def judged(
    plan: Mapping[str, Setting],
    level: Effect,
    seen: Mapping[str, Any],
    noise: Sequence[Any],
    *,
    strong: Sequence[Any] = (),
    other_start: bool = False,
) -> Compared:
    """Judge what a witness saw of a run.

    Args:
        plan: What the run was made under.
        level: What it must fulfil.
        seen: The witness's result.
        noise: Results of plain runs under noise of the plan's roundoff; not needed for "exact".
        strong: Results of plain runs under noise `TIMES` as large: what moves there as far, may.
        other_start: The run went on from weights that differ by rounding: those before its first step do not count.
    """
    common = {"plan": dict(plan), "level": str(level), "moved": seen["moved"], "counts": seen["counts"]}
    if seen["failed"]:
        return Compared(**common, ok=None, note=f"the check itself did not work here: {seen['failed']}")
    if seen["first"] is not None:
        return Compared(**common, ok=False, first=Difference(**seen["first"]))
    if level is Effect.EXACT:
        return Compared(**common, ok=True, agreed=Agreement(seen["counts"]["step"]))
    table = _Noise(noise, strong, roundoff_of(plan))
    worst, worst_at, first = 0.0, "", None
    first_step = next((moment for moment in seen["measured"] if moment["kind"] == "step"), None)
    for moment in seen["measured"]:
        for name, (apart, size, _, whole) in moment["apart"].items():
            if other_start and moment is first_step and name.startswith("weight before"):
                continue
            bound = table.bound(name, size, whole)
            share = min(apart / bound, _MOST) if bound > 0 else _MOST if apart > 0 else 0.0
            if share > worst:
                worst, worst_at = share, f"{name}, {moment['place']}"
            if share > 1 and first is None:
                first = _difference(moment["place"], name, apart, bound, size)
    first = first or table.tilted(seen["measured"])
    note = (
        "" if table.steps or not seen["measured"] else "the script could not be run under noise: nothing to hold it to"
    )
    ok = None if note else first is None
    agrees = None if note else _agreed(seen["measured"], table, first)
    return Compared(
        **common, ok=ok, first=first, worst=worst, worst_at=worst_at, sees=table.sees(), note=note, agreed=agrees
    )


def _agreed(measured: Sequence[Any], table: _Noise, first: Difference | None) -> Agreement | None:
    found = agreement_of(measured, table.bound, table.moved)
    if found is None or first is None or first.size is None or not first.what.startswith("gradient: "):
        return found
    # The one that parts is named, be it by one step or by all together.
    return replace(found, gradient_gap=first.size, worst=first.what.removeprefix("gradient: "), allowed=first.bound)


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
        most: The greatest difference; `share`: the same as a share of the tensor.
        along: Of a gradient, by how much it was longer in each step, run by run.
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
    """How far noise moved each tensor of the plain run, and which differences that allows."""

    def __init__(self, results: Sequence[Any], strong: Sequence[Any], roundoff: float) -> None:
        self.steps = sum(moment["kind"] == "step" for result in results for moment in result["measured"])
        self._roundoff = roundoff
        self._times = TIMES if roundoff <= SINGLE else _TIMES_16_BITS
        self._single = roundoff <= SINGLE
        self._usual, self._strong = _Moved(results), _Moved(strong)

    def bound(self, name: str, size: float, whole: float) -> float:
        """Return the greatest norm that a difference may have."""
        share = self.moved(name)
        times = self._times
        narrow = not self._single or name.startswith("weight")
        if share > (_ALL_NOISE_16_BITS if narrow else _ALL_NOISE):  # Adam's second moment is its square
            times = _TIMES_ALL_NOISE**2 if name.startswith("optimizer state") else _TIMES_ALL_NOISE
        # A weight moves by whole units in its last place, however small the step was.
        least = max(_SUMS * SINGLE * size, 8 * SINGLE * whole if name.startswith("weight") else 0.0)
        may = _SLACK * max(self._strong.share.get(name, 0.0) * size, self._strong.most.get(name, 0.0))
        return max(times * share * size, times * self._usual.most.get(name, 0.0), may, least)

    def moved(self, name: str) -> float:
        """Return the share of its size by which noise moves a tensor."""
        return self._usual.share.get(name, 0.0)

    def _tilt_bound(self, name: str) -> float:
        along = list(chain.from_iterable(self._usual.along.get(name, [[0.0]])))
        least = max(_SUMS * SINGLE, self._roundoff / 2)  # a weight that changes little is rounded alike in each step
        chance = _TILTS * math.sqrt(statistics.fmean(value**2 for value in along)) + least
        tilts = (abs(statistics.fmean(shares)) for shares in self._strong.along.get(name, ()))
        return max(chance, _SLACK * max(tilts, default=0.0))

    def tilted(self, measured: Iterable[Any]) -> Difference | None:
        """Return the gradient that is longer or shorter in every step, more than chance would have it."""
        for name, shares in _along(measured).items():
            mean, bound = statistics.fmean(shares), self._tilt_bound(name)
            if len(shares) >= 4 and abs(mean) > bound:
                how = f"is longer by {mean:.2%} over {len(shares)} steps; chance allows {bound:.2%} more or less"
                return Difference("all steps", name, how, abs(mean), bound)
        return None

    def sees(self) -> float:
        """Return the smallest systematic change that would be noticed in half of the gradients."""
        bounds = [self._tilt_bound(name) for name in self._usual.along if name.startswith("gradient")]
        return statistics.median(bounds) if bounds else 0.0


def _along(measured: Iterable[Any]) -> dict[str, list[float]]:
    """Return for each gradient by how much it is longer, step by step."""
    along: dict[str, list[float]] = {}
    for moment in measured:
        for name, (_, size, share, _) in moment["apart"].items():
            if name.startswith("gradient") and size > 0:
                along.setdefault(name, []).append(share)
    return along
