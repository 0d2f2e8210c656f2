"""Say what was not observed of a run, and why."""

from __future__ import annotations

from hasten.doctor.verdict.measure_cases import NO_TIME
from hasten.doctor.verdict.steady_use import steady_use
from hasten.evidence import Evidence
from hasten.evidence.weigh import on_gpu

_FEW_SAMPLES = 4  # samples of the machine's use; fewer are reported as too few
_TURNS = 6  # with fewer turns no change is significant, however many it wins (`Measurement.saved`)


def unseen(evidence: Evidence) -> tuple[str, ...]:
    """Return sentences on what was not observed, the most important first."""
    return tuple(
        line
        for line in (*_who_listened(evidence), *_gpu(evidence), *_machine(evidence), *_other_limits(evidence))
        if line
    )


def _who_listened(evidence: Evidence) -> list[str]:
    """Say what the recorder of this run does not look at: only doctor profiles steps."""
    names = {"run": "`hasten run`", "trainer": "the Trainer", "": "the Trainer", "trial": "a trial of `hasten tune`"}
    recorder = names.get(evidence.listened)
    if recorder is not None:
        subjects = "lines, layers, inputs and use of the machine"
        return [f"{subjects}: {recorder} listens to steps only; `hasten doctor SCRIPT` looks"]
    sampled = evidence.sampled
    if not evidence.step_phases or evidence.listened == "live":
        return []
    if sampled is None:
        return ["layers and operators: no step was looked into"]
    return [f"layers and operators: {sampled.skipped}"] if sampled.skipped else []


def _gpu(evidence: Evidence) -> list[str]:
    if evidence.machine.device != "cuda":
        return ["the GPU: this machine has none, so nothing is said of copies, host syncs, kernels or precision there"]
    if on_gpu(evidence) and not evidence.device_clock:
        return ["the GPU's own clock: phases are times of the calls that start its work"]
    return []


def _machine(evidence: Evidence) -> list[str]:
    """Say if the machine's use was sampled too little in the steady steps."""
    if evidence.listened not in ("doctor", "live") or not evidence.step_phases:
        return []
    use = steady_use(evidence)
    if use is None and evidence.listened == "live":
        return ["use of the machine: it is sampled from now on, the steps shown are from before"]
    if use is None:
        reason = (
            "its steady steps were over before a sample was taken" if evidence.use is not None else "none was taken"
        )
        return [f"use of the machine: {reason}; more --steps show it"]
    if use.samples < _FEW_SAMPLES:
        return [
            f"use of the machine: only {use.samples} samples fell into the steady steps; more --steps show it better"
        ]
    return []


def _other_limits(evidence: Evidence) -> list[str]:
    lines = []
    if evidence.flags.distributed > 1:
        lines.append(f"ranks other than {evidence.rank} of {evidence.flags.distributed}: one is listened to")
    if evidence.every > 1:
        lines.append(f"every step: of {evidence.steps} steps one of {evidence.every} was kept")
    hasty = [
        trial for trial in evidence.measured if trial.failed == NO_TIME or (not trial.failed and trial.turns < _TURNS)
    ]
    if hasty:
        untried = f"{len(hasty)} of {len(evidence.measured)}"
        lines.append(f"what {untried} changes would bring: this machine had no time to try them often enough")
    use = steady_use(evidence)
    if evidence.measured and use is not None and not on_gpu(evidence) and use.others >= evidence.machine.cores / 2:
        lines.append(
            "what changes are worth on a quiet machine: others computed here while they were tried, and threads "
            "that wait for a core make small operators seem slow"
        )
    return [*lines, *evidence.skipped]
