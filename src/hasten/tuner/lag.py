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
    shifts: dict[int, list[LossShift]] = {}
    for first_step in range(0, max(plan, default=0) + 2 - _WINDOW, _STRIDE):
        lag = _in_window(baseline, plan, first_step)
        if lag is not None:
            shifts.setdefault(lag.steps, []).append(lag)
            if len(shifts[lag.steps]) == _WINDOWS:
                return shifts[lag.steps][0]
    return None


def _in_window(baseline: Mapping[int, float], plan: Mapping[int, float], first_step: int) -> LossShift | None:
    plan_scatter, baseline_scatter = _scatter(plan, first_step), _scatter(baseline, first_step)
    if plan_scatter is None or baseline_scatter is None:
        return None
    unshifted = statistics.correlation(plan_scatter, baseline_scatter)
    if unshifted >= _FOLLOWS_NOT:
        return None
    lags = []
    for steps in (lag for lag in range(-_MOST, _MOST + 1) if lag):
        shifted = _scatter(baseline, first_step + steps)
        if shifted is None or statistics.correlation(baseline_scatter, shifted) >= _FOLLOWS_NOT:
            continue
        lags.append(LossShift(first_step + 1, steps, statistics.correlation(plan_scatter, shifted), unshifted))
    best = max(lags, key=lambda lag: lag.follows, default=None)
    return best if best is not None and best.follows >= _FOLLOWS else None


def _scatter(losses: Mapping[int, float], first_step: int) -> Sequence[float] | None:
    """Return a window's losses minus their linear trend; None if some are missing, or they do not scatter."""
    window = [losses[step] for step in range(first_step, first_step + _WINDOW) if step in losses]
    if len(window) < _WINDOW:
        return None
    slope, level = statistics.linear_regression(range(_WINDOW), window)
    scatter = [loss - level - slope * index for index, loss in enumerate(window)]
    least = _SMALLEST * max(map(abs, window))
    return scatter if statistics.pstdev(scatter) > least else None
