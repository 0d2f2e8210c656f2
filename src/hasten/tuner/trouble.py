"""Find out why a proof does not confirm a plan, and which techniques to take back."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.techniques import CATALOGUE, Effect
from hasten.tuner.length import TrainingLength
from hasten.tuner.outcome import effects_of, full_run, timings_of
from hasten.tuner.parity import parity_of
from hasten.tuner.proof import Answer, beside_others
from hasten.tuner.search_state import SearchState, mean_cpu_taken
from hasten.tuner.stats import ratio_of, steps_of
from hasten.tuner.trial import Trial

_PAID_AT_THE_START = ("sample_cache", "loader_workers", "compile")
_PAID_IN_EACH_PASS = ("loader_workers",)


@dataclass(frozen=True)
class Trouble:
    """Problem that the proof found, and the techniques to take back because of it."""

    reason: str
    blamed: tuple[str, ...]


def trouble_of(state: SearchState, pairs: list[tuple[Trial, Trial]], length: TrainingLength) -> Trouble | None:
    """Return the first problem that the proof shows; None if it confirms the plan."""
    if not state.chosen:
        return None
    plan = state.plan()
    all_names = tuple(plan)
    claim = state.claim()
    if claim is not None and claim.ratio < 1.0:
        beside = beside_others(state.disturbed())
        return Trouble(f"measured in turn{beside} it was not faster: {claim.ratio:.2f}x", all_names)
    if not pairs:
        return None
    broken = next((trial for _, trial in pairs if not trial.ok and trial.outcome != "nan"), None)
    if broken is not None:
        return Trouble(f"the whole plan failed in a fresh process: {broken.outcome}: {broken.reason}", all_names)
    timings = timings_of(pairs)
    if timings and (speed := ratio_of(timings)).ratio < 1.0:
        beside = beside_others(mean_cpu_taken([trial for pair in pairs for trial in pair]))
        ratio = f"{speed.ratio:.2f}x{beside}"
        in_each_pass = tuple(name for name in plan if name in _PAID_IN_EACH_PASS)
        if in_each_pass and in_each_pass != all_names and (steps := steps_of(timings).ratio) > 1.0:
            reason = f"steps of fresh processes are {steps:.2f}x as fast, whole epochs {ratio}: each pass begins slower"
            return Trouble(reason, in_each_pass)
        return Trouble(f"fresh processes did not confirm it: {ratio}", all_names)
    if (run := full_run(timings, length)) is not None and run.ratio < 1.0:
        epochs = f"{run.epochs} epoch{'s' * (run.epochs != 1)}"
        reason = (
            f"the whole run ({epochs}) would take {run.plan_seconds:.1f} s under it, for {run.baseline_seconds:.1f} s "
            "as it is: the extra start-up time is not recovered"
        )
        return Trouble(reason, tuple(name for name in plan if name in _PAID_AT_THE_START) or all_names)
    parity = parity_of(pairs, effects_of(state))
    if parity.answer is Answer.DOES_NOT:
        rounding = tuple(name for name, value in plan.items() if CATALOGUE[name].effect_of(value) is not Effect.EXACT)
        return Trouble(parity.note or "; ".join(check.what for check in parity.checks if not check.ok), rounding)
    return None
