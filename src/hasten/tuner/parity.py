"""Parity: do a plan's losses lie inside the baseline's own seed-to-seed band?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from hasten.evidence import Evidence
from hasten.tuner.proof import Parity, ParityCheck
from hasten.tuner.stats import prediction_band
from hasten.tuner.trial import Trial

MIN_SEEDS = 3
TEST = (
    "the mean over the plan's seeds must lie inside the 99 % prediction interval (Student's t) "
    "that the baseline's seeds give for it"
)


def parity_of(baseline: Sequence[Trial], plan: Sequence[Trial]) -> Parity:
    """Compare trials of both sides, one a seed.

    Compared are the training loss over the last half of the steps that all trials have and, where the script
    computes a loss in its validation, the last validation's mean loss.
    """
    bad = [trial for trial in plan if trial.outcome == "nan"]
    if bad:
        return Parity(False, TEST, note=f"under the plan {bad[0].reason}, with the baseline's seed {bad[0].seed}")
    if min(len(baseline), len(plan)) < MIN_SEEDS:
        return Parity(
            False,
            TEST,
            note=f"fewer than {MIN_SEEDS} seeds a side could be run in the budget: one seed proves nothing",
        )
    steps = min((len(trial.evidence.losses) for trial in (*baseline, *plan) if trial.evidence is not None), default=0)

    def _training_loss(evidence: Evidence) -> float | None:
        later = [loss for loss in evidence.losses[steps // 2 : steps] if loss is not None]
        return statistics.fmean(later) if later else None

    checks = []
    for what, read in (("training loss", _training_loss), ("validation loss", _validation_loss)):
        sides = _values(baseline, read), _values(plan, read)
        if min(map(len, sides)) >= MIN_SEEDS:
            checks.append(_check(what, *sides))
    if not checks:
        return Parity(False, TEST, note="no loss was seen: `backward` was never called on a single number")
    note = (
        ""
        if len(checks) > 1
        else "the script computes no loss in its validation that could be seen; only training was compared"
    )
    return Parity(all(check.ok for check in checks), TEST, tuple(checks), note)


def _check(what: str, baseline: tuple[float, ...], plan: tuple[float, ...]) -> ParityCheck:
    low, high = prediction_band(baseline, len(plan))
    mean = statistics.fmean(plan)
    centre = abs(statistics.fmean(baseline))
    detectable = (high - low) / 2 / centre if centre > 0 else 0.0
    return ParityCheck(what, baseline, plan, low, high, mean, detectable, low <= mean <= high)


def _values(trials: Sequence[Trial], read: Callable[[Evidence], float | None]) -> tuple[float, ...]:
    values = [read(trial.evidence) for trial in trials if trial.evidence is not None]
    return tuple(value for value in values if value is not None)


def _validation_loss(evidence: Evidence) -> float | None:
    """Mean loss of the last validation behind the first training step."""
    seen = [one for one in evidence.validations if one.step > 0]
    return seen[-1].loss if seen else None
