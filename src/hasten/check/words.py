"""Describe a check's result in words, the same on a terminal, on a page and in a test's message. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten.evidence.figures import percent
from hasten.techniques.base import toml_value

if TYPE_CHECKING:
    from hasten.check.judge import RunComparison
    from hasten.check.result import CheckResult

_LEVELS = {
    "exact": "equal to the bit",
    "rounding": "within the script's own rounding",
    "sampling": "the same but for the random numbers it draws",
}


def answer(result: CheckResult) -> str:
    """Return the answer in one line."""
    if not result.plan:
        return "Nothing to check: the plan is empty."
    if result.ok is None:
        return "Not known: whether the plan changes the training could not be found out."
    return f"The plan changes {'no more' if result.ok else 'the training more'} than its techniques may."


def reason(result: CheckResult) -> list[str]:
    """Return the first difference and the techniques to blame, a line each; [] if nothing differs."""
    first = result.first
    lines = [f"{first.place}: {first.what}: {first.how}"] if first is not None and result.ok is False else []
    if result.culprits:
        together = " together" if len(result.culprits) > 1 else ""
        lines.append(f"It is {' and '.join(result.culprits)}{together}; take it out of the plan.")
    return lines


def runs(result: CheckResult) -> list[tuple[str, str, bool]]:
    """Return for each run its plan, its outcome, and whether that is good."""
    labelled = [("", run) for run in result.runs] + [(f"{label}: ", run) for label, run in result.resumed]
    return [(f"{label}{_plan(run)}", _outcome(run), bool(run.ok)) for label, run in labelled]


def remarks(result: CheckResult) -> list[str]:
    """Return further remarks, a line each."""
    lines = [f"saved differently: {file}: {how}" for file, how in result.files]
    for run in result.runs:
        lines += [f"moved, as such a plan may: {stream}, from {place} on" for stream, place in run.moved.items()]
    return [*lines, *result.notes]


def _plan(run: RunComparison) -> str:
    return ", ".join(f"{name} = {toml_value(setting)}" for name, setting in run.plan.items()) or "as it is"


def _outcome(run: RunComparison) -> str:
    if not run.ok:
        return run.note or "differs"
    margin = ""
    if run.level != "exact":
        shows = f"; a change of {percent(run.sees)} in a gradient would have shown" if run.sees else ""
        margin = f" ({_largest(run.worst)}{shows})"
    return f"{_LEVELS[run.level]}{margin}, over {_counts(run)}"


def _largest(worst: float) -> str:
    """Describe the largest difference as a share of what rounding explains."""
    if not worst:
        return "no difference at all"
    share = "less than 0.1 %" if worst < 0.001 else percent(worst)
    return f"the largest difference is {share} of what rounding explains"


def _counts(run: RunComparison) -> str:
    labels = {"batch": "batches", "step": "optimizer steps", "validation": "validation forwards"}
    return ", ".join(f"{run.counts[kind]} {label}" for kind, label in labels.items() if run.counts.get(kind))
