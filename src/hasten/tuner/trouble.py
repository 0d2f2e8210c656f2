"""Why a proof does not bear a plan out."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.tuner.found import Found
from hasten.tuner.outcome import effects_of, timings_of
from hasten.tuner.parity import parity_of
from hasten.tuner.proof import Answer
from hasten.tuner.stats import ratio_of
from hasten.tuner.trial import Trial


@dataclass(frozen=True)
class Trouble:
    """What the proof found. `hopeless`: nothing of the plan is worth keeping; else its result is in doubt."""

    reason: str
    hopeless: bool


def trouble_of(found: Found, pairs: list[tuple[Trial, Trial]]) -> Trouble | None:
    """Why the proof does not bear the plan out, if it does not."""
    if not found.chosen:
        return None
    claim = found.claim()
    if claim is not None and claim.ratio < 1.0:
        return Trouble(f"measured in turn it was not faster: {claim.ratio:.2f}x", True)
    if not pairs:
        return None
    broken = next((plan for _, plan in pairs if not plan.ok and plan.outcome != "nan"), None)
    if broken is not None:
        return Trouble(f"the whole plan failed in a fresh process: {broken.outcome}: {broken.reason}", True)
    timings = timings_of(pairs)
    if timings and (speed := ratio_of(timings)).ratio < 1.0:
        return Trouble(f"fresh processes did not confirm it: {speed.ratio:.2f}x", True)
    parity = parity_of(pairs, effects_of(found))
    if parity.answer is Answer.DOES_NOT:
        return Trouble(parity.note or "; ".join(one.what for one in parity.checks if not one.ok), False)
    return None
