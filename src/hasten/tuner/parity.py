"""Parity: does a plan train to the same losses? Judged by the differences within pairs of runs of the same seed."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hasten.evidence import Evidence
from hasten.evidence.figures import percent
from hasten.evidence.interval import Estimate, mean_of
from hasten.techniques import Effect
from hasten.tuner.lag import LossShift, lag_of
from hasten.tuner.proof import Answer, Parity, ParityCheck
from hasten.tuner.stats import mean_of_course, mean_of_pairs
from hasten.tuner.trial import Trial

TOLERANCE = 0.03
"""A rise of the loss beyond this must be excluded before parity holds."""
HARMLESS = 0.005
"""A rise of the loss shown to be beyond this is no parity."""
TEST = (
    "each pair of runs has the same seed and the same order of samples, and their difference is judged: the 95 % "
    f"interval of the loss's change must exclude a rise of {TOLERANCE:.0%} or more; a rise shown to be above "
    f"{HARMLESS:.1%} by three pairs, or above {TOLERANCE:.0%} by fewer, is a change for the worse"
)
_ENOUGH = 3  # pairs needed to see how far rounding alone drives two runs of one seed apart
_MOST_WITHOUT_INTERVAL = 4  # validations per pair: no more than that give no usable interval
_FIRST_STEP_DIFFERENCE = 0.1  # of the loss: more than rounding can change in the first step
_GROSS = 0.1  # relative change of the last validation loss from which parity is left open
_TRAINING, _VALIDATION, _BATCHES = "training loss", "validation loss", "batches a pass"

_Pair = tuple[Trial, Trial]


def parity_of(pairs: Sequence[_Pair], effects: Collection[str] | None = None) -> Parity:
    """Judge pairs of trials (baseline, plan), one pair per seed.

    Compares the training loss over the later half of the steps that both runs of a pair have, the validation loss if
    the script computes one, the number of batches of each complete pass, the steps between validations, and whether the
    plan's step losses follow those of the same steps.

    Args:
        pairs: Trials of both sides.
        effects: Effects of the plan's techniques. If one changes the optimisation path, batches may differ in number.
        If
            all are exact or rounding, losses must follow each other step by step. None if unknown: then the latter is
            not required.
    """
    findings = _Findings()
    _note_nan(pairs, findings)
    measured = [pair for pair in pairs if all(trial.ok and trial.evidence for trial in pair)]
    _compare_losses(measured, findings)
    if Effect.TRAJECTORY not in (effects or ()):
        _compare_batches(measured, findings)
    if effects is not None and set(effects) <= {Effect.EXACT, Effect.ROUNDING}:
        _compare_steps(measured, findings)
    return findings.parity()


@dataclass
class _Findings:
    """Comparisons, and sentences that refute parity, leave it open, or add a remark."""

    checks: list[ParityCheck] = field(default_factory=list)
    against: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def parity(self) -> Parity:
        """Return the verdict: refuted, open, or holding, with its sentences."""
        answer = Answer.DOES_NOT if self.against else Answer.NOT_KNOWN if self.open else Answer.HOLDS
        sentences = self.against or self.open
        return Parity(answer, TEST, tuple(self.checks), "; ".join([*sentences, *self.remarks]))


def _note_nan(pairs: Sequence[_Pair], findings: _Findings) -> None:
    """Note losses that are NaN or infinite: against the plan, unless the baseline has them too."""
    for baseline, plan in pairs:
        if _diverged(plan) and not _diverged(baseline):
            how = plan.reason or "losses were NaN or infinite"
            findings.against.append(f"under the plan {how}, with seed {plan.seed}; none were without it")
        elif _diverged(baseline):
            findings.open.append(f"the script's own losses are NaN or infinite with seed {baseline.seed}")


def _diverged(trial: Trial) -> bool:
    return trial.outcome == "nan" or bool(trial.evidence and trial.evidence.bad_losses)


# -- losses -----------------------------------------------------------------------------------------------------------


def _compare_losses(pairs: Sequence[_Pair], findings: _Findings) -> None:
    """Compare training losses, and validation losses if there are any."""
    if not pairs:
        findings.open.append("no pair of runs was measured on both sides")
        return
    halves = [_later_half(pair) for pair in pairs]
    scales = [_scale(half) for half in halves]
    if not any(halves):
        findings.open.append("no loss was seen: `backward` was never called on a single number")
        return
    courses = [
        mean_of_course([(plan - baseline) / scale for baseline, plan in half])
        for half, scale in zip(halves, scales, strict=True)
    ]
    estimates = [course for course in courses if course is not None]
    if not estimates:
        findings.open.append(f"too few steps to compare: {max(map(len, halves))} with a loss in the later half")
        return
    means = [tuple(map(statistics.fmean, zip(*half, strict=True))) for half in halves if half]
    _judge(_TRAINING, [(a, b) for a, b in means], mean_of_pairs(estimates), findings)
    _compare_validations(pairs, findings)


def _later_half(pair: _Pair) -> list[tuple[float, float]]:
    """Return both losses of each step in the later half of the steps that both have."""
    baseline, plan = (_losses(trial) for trial in pair)
    steps = sorted(baseline.keys() & plan.keys())
    return [(baseline[step], plan[step]) for step in steps if step >= (steps[-1] + 1) // 2]


def _losses(trial: Trial) -> Mapping[int, float]:
    """Return the loss of each step, by the step's number."""
    evidence = trial.evidence
    if evidence is None:
        return {}
    return {evidence.number(index): loss for index, loss in enumerate(evidence.losses) if loss is not None}


def _scale(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the unit of relative changes: the size of the baseline's mean loss, else of the plan's, else 1."""
    for side in (0, 1):
        if pairs and (mean := abs(statistics.fmean(losses[side] for losses in pairs))) > 0:
            return mean
    return 1.0


def _compare_validations(pairs: Sequence[_Pair], findings: _Findings) -> None:
    """Compare validation losses. They may refute parity, but noise in them does not leave it open.

    A few validations of a few short runs seldom show small changes. Whether evaluation computes the same is the
    check's job, which compares the model's outputs in eval mode on the same weights.
    """
    courses = [_validations(pair) for pair in pairs]
    if not all(courses):
        findings.remarks.append(
            "the script computes no loss in its validation that could be seen; only training was compared"
        )
        return
    last = [course[-1] for course in courses]
    estimate = _validation_change(courses)
    if estimate is not None:
        _judge(_VALIDATION, last, estimate, findings)
        return
    change = statistics.fmean((plan - baseline) / _scale([(baseline, plan)]) for baseline, plan in last)
    remark = f"the last validation's loss is {_signed(change)}, which so few runs cannot tell from chance"
    (findings.open if change > _GROSS else findings.remarks).append(remark)


def _validation_change(courses: Sequence[Sequence[tuple[float, float]]]) -> Estimate | None:
    """Return the mean change of the validation loss; None if there are too few validations for an interval.

    From three pairs on, each pair contributes the mean of its later half. With one or two pairs, the interval comes
    from the validations within each pair, without the first.
    """
    changes = [[(plan - baseline) / _scale(course[-1:]) for baseline, plan in course] for course in courses]
    if len(courses) > 2:
        return mean_of([statistics.fmean(course[len(course) // 2 :]) for course in changes])
    estimates = [mean_of(course[1:]) for course in changes if len(course) > _MOST_WITHOUT_INTERVAL]
    intervals = [estimate for estimate in estimates if estimate is not None]
    return mean_of_pairs(intervals) if len(intervals) == len(courses) else None


def _validations(pair: _Pair) -> list[tuple[float, float]]:
    """Return both losses of each validation after the first training step that both sides have."""
    sides = [[validation for validation in _evidence(trial).validations if validation.step > 0] for trial in pair]
    pairs = zip(*sides, strict=False)
    return [
        (baseline.loss, plan.loss)
        for baseline, plan in pairs
        if baseline.loss == baseline.loss and plan.loss == plan.loss
    ]


def _judge(quantity: str, values: Sequence[tuple[float, float]], estimate: Estimate, findings: _Findings) -> None:
    """Record a comparison: refuted, open, or within the tolerance."""
    is_higher = estimate.low > 0 and estimate.mean > HARMLESS
    harmless = HARMLESS if len(values) >= _ENOUGH else TOLERANCE
    interval = f"{_signed(estimate.mean)} [{_signed(estimate.low)}, {_signed(estimate.high)}]"
    if estimate.low > harmless:
        findings.against.append(f"the {quantity} is higher under the plan: {interval}")
    elif is_higher:
        findings.open.append(f"the {quantity} may be higher under the plan: {interval}; more pairs would tell")
    elif estimate.high > TOLERANCE:
        remark = f"the {quantity} changed by {interval}: only changes above {percent(estimate.half)} could be seen"
        (findings.remarks if quantity == _VALIDATION else findings.open).append(remark)
    elif estimate.high < -HARMLESS:
        findings.remarks.append(f"the {quantity} is lower under the plan: {interval}")
    baseline, plan = (tuple(side) for side in zip(*values, strict=True))
    findings.checks.append(
        ParityCheck(quantity, baseline, plan, estimate.mean, estimate.low, estimate.high, estimate.half, not is_higher)
    )


def _signed(change: float) -> str:
    return f"{'-' if change < 0 else '+'}{percent(abs(change))}"


# -- batches and steps ------------------------------------------------------------------------------------------------


def _compare_batches(pairs: Sequence[_Pair], findings: _Findings) -> None:
    """Compare the number of batches of each complete pass, and the number of steps before each validation."""
    counts = []
    for pair in pairs:
        for quantity, count_of in (("batches in a pass", _batches), ("steps before a validation", _steps)):
            baseline_counts, plan_counts = (count_of(_evidence(trial)) for trial in pair)
            counts += [
                (pair[1].seed, quantity, (baseline_counts[key], plan_counts[key]))
                for key in sorted(baseline_counts.keys() & plan_counts.keys())
            ]
    passes = [values for _, quantity, values in counts if quantity == "batches in a pass"]
    for seed, quantity, (baseline_count, plan_count) in counts:
        if baseline_count != plan_count:
            findings.against.append(
                f"{plan_count} {quantity} under the plan and {baseline_count} without it, with seed {seed}"
            )
            break
    if passes:
        change = max(((plan_count - baseline_count) / baseline_count for baseline_count, plan_count in passes), key=abs)
        baseline, plan = (
            tuple(float(count) for count in values_of_side) for values_of_side in zip(*passes, strict=True)
        )
        findings.checks.append(ParityCheck(_BATCHES, baseline, plan, change, change, change, 0.0, ok=baseline == plan))


def _batches(evidence: Evidence) -> dict[tuple[int, int], int]:
    """Return the number of batches of each complete training pass: (loader, number of the pass) -> batches.

    A pass is complete if another began after its end. The pass that was open when the trial ended was cut short.
    """
    last_start = max((loader_pass.start for loader_pass in evidence.passes), default=0.0)
    batches: dict[tuple[int, int], int] = {}
    passes_of_loader: Counter[int] = Counter()
    for loader_pass in evidence.passes:
        if loader_pass.trained and loader_pass.batches and loader_pass.end <= last_start:
            batches[loader_pass.loader, passes_of_loader[loader_pass.loader]] = loader_pass.batches
            passes_of_loader[loader_pass.loader] += 1
    return batches


def _steps(evidence: Evidence) -> dict[tuple[int, int], int]:
    """Return the steps before each validation; {} if steps are batches, since then passes show it better."""
    validations = evidence.validations if evidence.step_of == "optimizer" else ()
    return {(0, number): validation.step for number, validation in enumerate(validations)}


def _compare_steps(pairs: Sequence[_Pair], findings: _Findings) -> None:
    """Compare which batch each step trained on, as far as the losses show it."""
    for pair in pairs:
        baseline, plan = (_losses(trial) for trial in pair)
        first = min(baseline.keys() & plan.keys(), default=None)
        # The first step has the same weights and batch on both sides, so a large difference means that steps do not
        # match: a script that collects batches in a list first has steps that are not seen, different ones each time.
        if first is not None and abs(plan[first] - baseline[first]) > _FIRST_STEP_DIFFERENCE * _scale(
            [(baseline[first], plan[first])]
        ):
            findings.open.append(
                f"the two runs begin with other losses ({baseline[first]:.4g}, under the plan {plan[first]:.4g}, with "
                f"seed {pair[1].seed}): their steps could not be matched"
            )
            return
        lag = lag_of(baseline, plan)
        if lag is not None:
            findings.against.append(_lag_in_words(lag, pair[1].seed))
            return


def _lag_in_words(lag: LossShift, seed: int) -> str:
    steps = f"{abs(lag.steps)} {'step' if abs(lag.steps) == 1 else 'steps'} {'later' if lag.steps > 0 else 'earlier'}"
    does = "leaves batches out" if lag.steps > 0 else "puts batches in"
    return (
        f"from about step {lag.step} on the plan's losses follow those of {steps} (correlation {lag.follows:.2f}; of "
        f"the same steps {lag.unshifted:.2f}), with seed {seed}: the plan {does}"
    )


def _evidence(trial: Trial) -> Evidence:
    assert trial.evidence is not None
    return trial.evidence
