"""Verdicts without phases: no step was completed, memory ran out, or the training hangs. And caveats of any verdict."""

from __future__ import annotations

from hasten.doctor.verdict.diagnosis import Verdict
from hasten.doctor.verdict.steady_use import SteadyUse
from hasten.evidence import Evidence, Phase, split_place

_CROWDED = 0.6  # busy share of the cores from which other processes count as slowing the training
_FEW_STEPS = 10  # steady steps below which a verdict is called rough


def out_of_memory(evidence: Evidence) -> Verdict:
    """Return the verdict of a training that ran out of memory."""
    progress = f"{evidence.steps} steps were seen before" if evidence.steps else "it was before the first step"
    return Verdict("memory", "out of memory: the training needs more than there is", (f"{evidence.error}; {progress}",))


def untrained(evidence: Evidence) -> Verdict:
    """Return the verdict of a run without a completed step: how far the script got."""
    details = []
    if evidence.stopped_at:
        place = _place(evidence.stopped_at)
        details.append(f"after {evidence.ended_at:.0f} s, when it was cut, the script was at {place}")
        title = "no training step was over when the time was up"
    elif evidence.error:
        # Of a killed run only the live file is left. If it is empty, the run may still have trained: the live file is
        # first written about a second after training began.
        reported = (
            not evidence.error.startswith("killed by") or evidence.loaders or evidence.models or evidence.optimizers
        )
        title = "the script ended before a training step was " + ("over" if reported else "heard of")
        details.append(evidence.error)
    else:
        title = "no training step was seen"
        details.append("a step is a batch of a DataLoader with a backward in it, or a step of a torch optimizer")
    built = [f"{len(evidence.loaders)} DataLoaders"] * bool(evidence.loaders)
    built += [f"a model {model.name}" for model in evidence.models[:1]]
    built += [f"an optimizer {optimizer.name}" for optimizer in evidence.optimizers[:1]]
    if built:
        details.append(f"it had built {', '.join(built)}")
    if evidence.stopped_at:
        details.append("--seconds gives it more time")
    return Verdict("untrained", title, tuple(details))


def stands_still(evidence: Evidence) -> float:
    """Return the seconds since the last completed step."""
    return evidence.ended_at - evidence.step_start[-1] - sum(evidence.step_phases[-1])


def stuck(evidence: Evidence) -> str:
    """Return a sentence on the step that was running when the run was cut; "" if there was none."""
    if not evidence.stopped_at or not evidence.step_phases:
        return ""
    return (
        f"a step was going on for {stands_still(evidence):.0f} s when the time was up, at {_place(evidence.stopped_at)}"
    )


def _place(where: str) -> str:
    file, line = split_place(where)
    return f"{file}, line {line}" if file else where


def _unfinished_caveat(evidence: Evidence) -> str:
    cut = f", which was not over when the time was up, at {_place(evidence.stopped_at)}" if evidence.stopped_at else ""
    return f"a rough answer: it rests on {sum(evidence.unfinished):.3g} s of the first step{cut}"


def caveats(evidence: Evidence, use: SteadyUse | None) -> list[str]:
    """Return sentences on what makes a verdict less certain: few steps, a hidden gradient sync, other processes."""
    sentences = []
    steady = evidence.steady()
    if not steady:
        sentences.append(_unfinished_caveat(evidence))
    elif len(steady) < _FEW_STEPS:
        step_count = f"{len(steady)} step{'s' * (len(steady) != 1)}"
        disturbed = {evidence.number(index) for index in steady} & set(evidence.disturbed)
        reason = ", slowed by the look into them" if disturbed else ""
        reason = reason or (", warm-up included" if len(evidence.step_phases) < _FEW_STEPS else "")
        sentences.append(f"a rough answer: it rests on {step_count}{reason}")
    # No step has a sync phase, so gradients were exchanged within backward, as DistributedDataParallel does.
    if evidence.flags.distributed > 1 and not any(step[Phase.SYNC] for step in evidence.step_phases):
        sentences.append(f"backward contains the gradient sync of {evidence.flags.distributed} processes")
    if use is not None and use.others >= 0.25 * evidence.machine.cores and use.machine >= _CROWDED:
        sentences.append(
            f"other processes used {use.others:.1f} cores of this machine: it would be faster without them"
        )
    return sentences
