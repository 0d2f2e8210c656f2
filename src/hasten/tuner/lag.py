"""Lag: finds that a plan's step losses follow those of other steps, since a batch was left out or put in."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WINDOW = 24  # steps
_STRIDE = 8
_MOST = 8  # steps by which one side may be behind
_FOLLOWS = 0.8
_FOLLOWS_NOT = 0.4
_WINDOWS = 2  # in which the same is seen: one may be chance
_SMALLEST = 1e-6  # of the loss: what scatters less is rounding, not batches


@dataclass(frozen=True)
class Lag:
    """Where the plan's losses follow those of other steps.

    Attributes:
        step: The first step (from 1) of the first window in which that is seen.
        steps: By how many steps the plan is ahead of the baseline; below 0: behind.
        follows: Correlation of the losses, shifted by so many steps.
        unshifted: Correlation of the losses as they are.
    """

    step: int
    steps: int
    follows: float
    unshifted: float


def lag_of(baseline: Mapping[int, float], plan: Mapping[int, float]) -> Lag | None:
    """Return where the plan's losses follow those of other steps; None where they do not, or nobody can tell.

    Both sides are given the same batches, and some batches are harder than others: that scatter of the losses is
    the mark by which a batch is known again. Window by window, and with its trend taken out, the scatter of the
    plan's losses is held against the baseline's at the same steps and at steps shortly before and after. Only what
    fits at other steps, and does not at the same ones, is a finding. So losses that do not scatter (no noise, or a
    constant) show nothing, nor do two sides that rounding has driven apart: these fit nowhere. Losses that repeat
    themselves fit themselves at other steps, which is no finding either.

    Args:
        baseline: Number of a step -> its loss.
        plan: The same under the plan.
    """
    found: dict[int, list[Lag]] = {}
    for start in range(0, max(plan, default=0) + 2 - _WINDOW, _STRIDE):
        lag = _in_window(baseline, plan, start)
        if lag is not None:
            found.setdefault(lag.steps, []).append(lag)
            if len(found[lag.steps]) == _WINDOWS:
                return found[lag.steps][0]
    return None


def _in_window(baseline: Mapping[int, float], plan: Mapping[int, float], start: int) -> Lag | None:
    ours, theirs = _scatter(plan, start), _scatter(baseline, start)
    if ours is None or theirs is None:
        return None
    unshifted = statistics.correlation(ours, theirs)
    if unshifted >= _FOLLOWS_NOT:
        return None
    lags = []
    for steps in (lag for lag in range(-_MOST, _MOST + 1) if lag):
        other = _scatter(baseline, start + steps)
        if other is None or statistics.correlation(theirs, other) >= _FOLLOWS_NOT:
            continue
        lags.append(Lag(start + 1, steps, statistics.correlation(ours, other), unshifted))
    best = max(lags, key=lambda lag: lag.follows, default=None)
    return best if best is not None and best.follows >= _FOLLOWS else None


def _scatter(losses: Mapping[int, float], start: int) -> Sequence[float] | None:
    """Return a window's losses without their trend; None where some are missing or they do not scatter."""
    window = [losses[step] for step in range(start, start + _WINDOW) if step in losses]
    if len(window) < _WINDOW:
        return None
    slope, level = statistics.linear_regression(range(_WINDOW), window)
    scatter = [loss - level - slope * place for place, loss in enumerate(window)]
    least = _SMALLEST * max(map(abs, window))
    return scatter if statistics.pstdev(scatter) > least else None
