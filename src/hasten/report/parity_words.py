"""Say in sentences whether a plan keeps the result the same: gradients, losses of paired runs, and blind spots."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.check.agreement import Agreement
from hasten.report import words
from hasten.tuner.proof import Answer, ParityCheck, Proof

_SAME_DIRECTION = 0.99  # cosine above which gradients count as pointing the same way


@dataclass(frozen=True)
class ParityAnswer:
    """The answer about parity; `title` and `detail` together make a sentence."""

    answer: Answer
    title: str
    detail: str


def parity(proof: Proof) -> ParityAnswer:
    """Return whether the plan's losses stay the same, in one sentence."""
    answer, checks = proof.parity.answer, proof.parity.checks
    if answer is Answer.NOT_KNOWN:
        why = proof.parity.note or ("nothing was kept" if not proof.techniques else "no losses were compared")
        return ParityAnswer(answer, "Whether the losses stay the same is not known", words.clean(why))
    if answer is Answer.HOLDS:
        return ParityAnswer(
            answer, "Parity holds", _detectable(checks) or words.clean(proof.parity.note) or "no loss changed"
        )
    changed = ", ".join(f"{words.clean(check.what)} {words.signed(check.change)}" for check in checks if not check.ok)
    return ParityAnswer(
        answer, "Parity does NOT hold", changed or words.clean(proof.parity.note) or "the losses differ"
    )


def _detectable(checks: tuple[ParityCheck, ...]) -> str:
    """Return the smallest change of each loss that would have been detected, for a plan whose losses did not change.

    Each loss is listed separately because they differ: a validation of few batches may detect 8 %, while the same runs
    detect 1 % of the training loss.
    """
    if not any(words.known(check.detectable) for check in checks):
        return ""
    return f"{' and '.join(words.clean(check.what) for check in checks)} alike; {_least(checks)} would have been seen"


def _least(checks: tuple[ParityCheck, ...]) -> str:
    """Return the smallest detectable change; named by quantity if there are several checks."""
    limited = [check for check in checks if words.known(check.detectable) and not _equal(check)]
    if not limited:
        return "any change"
    if len(checks) == 1:
        return f"a change above {words.percent(limited[0].detectable)}"
    changes = " or ".join(f"{words.percent(check.detectable)} ({words.clean(check.what)})" for check in limited)
    return f"a change above {changes}"


def _equal(check: ParityCheck) -> bool:
    """Return whether a quantity was the same in every pair, such as the number of batches."""
    return bool(check.baseline) and check.baseline == check.plan


def check(check: ParityCheck) -> str:
    """Return one parity check as a sentence, including the smallest change it can detect."""
    pairs = words.count(min(len(check.baseline), len(check.plan)), "pair")
    if _equal(check):
        return f"{words.clean(check.what)}: equal in {pairs}"
    if words.known(check.detectable):
        detectable = f"a change below {words.percent(check.detectable)} goes unseen"
    else:
        detectable = "how small a change it sees cannot be said"
    interval = "no interval"
    if words.known(check.low) and words.known(check.high):
        interval = f"95 % interval {words.signed(check.low)} to {words.signed(check.high)}"
    refutation = "" if check.ok else "NOT the same: "
    change = f"{refutation}{words.signed(check.change)} under the plan ({interval}, {pairs})"
    return f"{words.clean(check.what)}: {change}; {detectable}"


def agreement(measured: Agreement) -> list[str]:
    """Return in sentences how far plain and plan agree on the same weights and batches."""
    in_tensor = f", in {words.clean(measured.worst)}" if measured.worst else ""
    loss, steps = words.percent(measured.loss_gap), words.count(measured.steps, "step")
    direction, gap = _direction(measured), f"{words.percent(measured.gradient_gap)} of a tensor{in_tensor}"
    return [
        f"Gradients point {direction}: the smallest cosine is {_cosine(measured)} (1 is the same direction).",
        f"Their largest difference is {gap}; {_explained(measured)}.",
        f"The loss of a step differs by {loss} at most, over {steps}.",
    ]


def agreement_in_short(measured: Agreement) -> str:
    """Return how far plain and plan agree on the same weights and batches, in one sentence."""
    gap, loss = words.percent(measured.gradient_gap), words.percent(measured.loss_gap)
    return (
        f"same batches, {words.count(measured.steps, 'step')}: cosine of the gradients {_cosine(measured)}, "
        f"they differ by {gap} ({_explained(measured)}), losses by {loss}"
    )


def _direction(measured: Agreement) -> str:
    if not words.known(measured.cosine):
        return "it is not known where"
    return "the same way" if measured.cosine > _SAME_DIRECTION else "elsewhere"


def _cosine(measured: Agreement) -> str:
    return f"{measured.cosine:.5f}" if words.known(measured.cosine) else words.NONE


def _explained(measured: Agreement) -> str:
    if measured.allowed is None or not words.known(measured.allowed):
        return "how much of that rounding explains is not known"
    exceeds = measured.gradient_gap > measured.allowed
    allowed = words.percent(measured.allowed)
    return f"MORE than the {allowed} that rounding explains" if exceeds else f"rounding explains up to {allowed}"


def agrees(measured: Agreement) -> bool:
    """Return whether the gradients agree as far as rounding allows; the direction alone counts if that is unknown."""
    return measured.cosine > _SAME_DIRECTION and (measured.allowed is None or measured.gradient_gap <= measured.allowed)


def blind_spots(proof: Proof) -> list[str]:
    """Return what the parity test cannot see, in sentences."""
    spots = []
    if proof.parity.checks:
        fewest = min(min(len(check.baseline), len(check.plan)) for check in proof.parity.checks)
        spots.append(f"It rests on {words.count(fewest, 'pair')} of runs at the least; more pairs see smaller changes.")
        if fewest < 2:
            spots.append("One pair proves nothing: without a second it is not known how much pairs differ by chance.")
        spots += [
            f"A change of the {words.clean(check.what)} by less than {words.percent(check.detectable)} can pass unseen."
            for check in proof.parity.checks
            if words.known(check.detectable) and not _equal(check)
        ]
    if proof.curves.steps:
        spots.append(
            f"Those runs end at step {max(proof.curves.steps)}: what comes later in the full run, and the final "
            "quality, was not measured."
        )
    spots.append("Only the quantities named here were compared; other metrics of yours were not.")
    return spots
