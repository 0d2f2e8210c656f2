"""Find out why a proof does not confirm a plan, and which techniques to take back."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.techniques import CATALOGUE, Effect
from hasten.tuner.found import SearchState, taken_of
from hasten.tuner.length import TrainingLength
from hasten.tuner.outcome import effects_of, full_run, timings_of
from hasten.tuner.parity import parity_of
from hasten.tuner.proof import Answer, beside_others
from hasten.tuner.stats import ratio_of, steps_of
from hasten.tuner.trial import Trial

_PAID_AT_THE_START = ("sample_cache", "loader_workers", "compile")
_PAID_IN_EACH_PASS = ("loader_workers",)


@dataclass(frozen=True)
class Trouble:
    """Problem that the proof found, and the techniques to take back because of it."""

    reason: str
    blamed: tuple[str, ...]


def trouble_of(found: SearchState, pairs: list[tuple[Trial, Trial]], length: TrainingLength) -> Trouble | None:
    """Return the first problem that the proof shows; None if it confirms the plan."""
    if not found.chosen:
        return None
    plan = found.plan()
    whole = tuple(plan)
    claim = found.claim()
    if claim is not None and claim.ratio < 1.0:
        beside = beside_others(found.disturbed())
        return Trouble(f"measured in turn{beside} it was not faster: {claim.ratio:.2f}x", whole)
    if not pairs:
        return None
    broken = next((trial for _, trial in pairs if not trial.ok and trial.outcome != "nan"), None)
    if broken is not None:
        return Trouble(f"the whole plan failed in a fresh process: {broken.outcome}: {broken.reason}", whole)
    timings = timings_of(pairs)
    if timings and (speed := ratio_of(timings)).ratio < 1.0:
        beside = beside_others(taken_of([side for pair in pairs for side in pair]))
        told = f"{speed.ratio:.2f}x{beside}"
        in_each_pass = tuple(name for name in plan if name in _PAID_IN_EACH_PASS)
        if in_each_pass and in_each_pass != whole and (steps := steps_of(timings).ratio) > 1.0:
            reason = f"steps of fresh processes are {steps:.2f}x as fast, whole epochs {told}: each pass begins slower"
            return Trouble(reason, in_each_pass)
        return Trouble(f"fresh processes did not confirm it: {told}", whole)
    if (run := full_run(timings, length)) is not None and run.ratio < 1.0:
        epochs = f"{run.epochs} epoch{'s' * (run.epochs != 1)}"
        reason = (
            f"the whole run ({epochs}) would take {run.plan_seconds:.1f} s under it, for {run.baseline_seconds:.1f} s "
            "as it is: the extra start-up time is not recovered"
        )
        return Trouble(reason, tuple(name for name in plan if name in _PAID_AT_THE_START) or whole)
    parity = parity_of(pairs, effects_of(found))
    if parity.answer is Answer.DOES_NOT:
        rounding = tuple(name for name, value in plan.items() if CATALOGUE[name].effect_of(value) is not Effect.EXACT)
        return Trouble(parity.note or "; ".join(one.what for one in parity.checks if not one.ok), rounding)
    return None
