"""Detect that a plan's step losses follow those of other steps, because a batch was left out or put in."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WINDOW = 24  # steps
_STRIDE = 8
_MOST = 8  # steps: largest shift that is looked for
_FOLLOWS = 0.8  # correlation from which losses match
_FOLLOWS_NOT = 0.4  # correlation below which losses do not match
_WINDOWS = 2  # windows that must show the same shift: one may be chance
_SMALLEST = 1e-6  # of the loss: smaller scatter comes from rounding, not from batches


@dataclass(frozen=True)
class LossShift:
    """Shift between the plan's losses and the baseline's.

    Attributes:
        step: First step (from 1) of the first window that shows it.
        steps: Number of steps by which the plan is ahead of the baseline; negative if it is behind.
        follows: Correlation of the losses shifted by so many steps.
        unshifted: Correlation of the losses without a shift.
    """

    step: int
    steps: int
    follows: float
    unshifted: float


def lag_of(baseline: Mapping[int, float], plan: Mapping[int, float]) -> LossShift | None:
    """Return the shift of the plan's losses against the baseline's; None if there is none, or it cannot be known.

    Both sides get the same batches, and some batches are harder than others: the scatter of the losses around their
    trend identifies the batches. In windows of steps, the plan's scatter is correlated with the baseline's at the same
    steps and at steps shortly before and after. A shift is reported only if another place fits and the same place does
    not. So losses without scatter show nothing, two sides that rounding has driven apart fit nowhere, and losses
    that repeat themselves (they fit their own shifted copy) are left out.

    Args:
        baseline: Step number -> loss of the baseline.
        plan: Step number -> loss under the plan.
    """
    found: dict[int, list[LossShift]] = {}
    for start in range(0, max(plan, default=0) + 2 - _WINDOW, _STRIDE):
        lag = _in_window(baseline, plan, start)
        if lag is not None:
            found.setdefault(lag.steps, []).append(lag)
            if len(found[lag.steps]) == _WINDOWS:
                return found[lag.steps][0]
    return None


def _in_window(baseline: Mapping[int, float], plan: Mapping[int, float], start: int) -> LossShift | None:
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
        lags.append(LossShift(start + 1, steps, statistics.correlation(ours, other), unshifted))
    best = max(lags, key=lambda lag: lag.follows, default=None)
    return best if best is not None and best.follows >= _FOLLOWS else None


def _scatter(losses: Mapping[int, float], start: int) -> Sequence[float] | None:
    """Return a window's losses minus their linear trend; None if some are missing, or they do not scatter."""
    window = [losses[step] for step in range(start, start + _WINDOW) if step in losses]
    if len(window) < _WINDOW:
        return None
    slope, level = statistics.linear_regression(range(_WINDOW), window)
    scatter = [loss - level - slope * place for place, loss in enumerate(window)]
    least = _SMALLEST * max(map(abs, window))
    return scatter if statistics.pstdev(scatter) > least else None
