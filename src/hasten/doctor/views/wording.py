"""Put a diagnosis into sentences and figures, which the terminal and the page share."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hasten.doctor.verdict.diagnosis import Diagnosis
from hasten.evidence import PHASES, Evidence, Finding, HowKnown, SampledLine, Severity, Stages, split_place
from hasten.evidence.finding import worst_first
from hasten.evidence.weigh import process_peak
from hasten.report import words

_FEWEST_SAMPLES = 30  # samples of the training thread; with fewer, no lines are shown
_HOT_SHARE = 0.10  # share of the step from which a line is shown
_MOST_LINES = 4
NO_FINDINGS = "Nothing found that costs more than 1 % of a step."


@dataclass(frozen=True)
class PhaseRow:
    """One phase of a steady step, in seconds and in words."""

    name: str
    label: str
    seconds: float
    share: str


def phase_rows(diagnosis: Diagnosis) -> list[PhaseRow]:
    """Return the phases that took any time, in the order of a step; unknown phases come last."""
    names = [name for name in dict.fromkeys([*PHASES, *diagnosis.phases]) if _positive(diagnosis.phases.get(name))]
    seconds = [diagnosis.phases[name] for name in names]
    total = sum(seconds)
    return [
        PhaseRow(name, words.phase(name), amount, _share(amount / total))
        for name, amount in zip(names, seconds, strict=True)
    ]


def _positive(value: float | None) -> bool:
    return value is not None and words.known(value) and value > 0


def _share(share: float) -> str:
    return words.percent(share) if share >= 0.001 else "<0.1 %"


def place(finding: Finding) -> str:
    """Return a finding's `file:line`, relative to the current folder if that is shorter; else its module path or ""."""
    if not finding.file:
        return words.clean(finding.where)
    path = shorter(finding.file)
    return words.clean(f"{path}:{finding.line}" if finding.line else path)


def shorter(path: str) -> str:
    """Return a path relative to the current folder if that is shorter, else unchanged."""
    try:
        relative = os.path.relpath(path)
    except (ValueError, OSError):  # a null byte in the path, or the current folder was deleted
        return path
    return relative if len(relative) < len(path) else path


def worth(finding: Finding) -> str:
    """Return a finding's worth and how it is known, as text; "" if unknown."""
    if finding.how_known is HowKnown.READ:
        return "read from code, not measured"
    if finding.worth is None or not words.known(finding.worth):
        return ""
    share = f"up to {words.percent(finding.worth)}" if finding.worth >= 0.01 else "less than 1 %"
    return f"{share} of the step, {finding.how_known.value}"


def listened_to(diagnosis: Diagnosis) -> str:
    """Return the training's command, and how many of its steps were seen."""
    text = words.command(diagnosis.command) or "a run"
    return f"{text} ({words.count(diagnosis.steps, 'training step')} seen)"


def step_line(diagnosis: Diagnosis) -> str:
    """Return a line on the steady step: mean, median, spread, number of steps; "" without steps."""
    if not _positive(diagnosis.step):
        return ""
    parts = [f"mean {words.duration(diagnosis.step)}"]
    if _positive(diagnosis.median):
        parts.append(f"median {words.duration(diagnosis.median)}")
        if _positive(diagnosis.spread):
            parts.append(f"middle half within {words.duration(diagnosis.spread)}")
    return ", ".join(parts) + (f"; {counted}" if (counted := steps_counted(diagnosis)) else "")


def steps_counted(diagnosis: Diagnosis) -> str:
    """Return which steps the figures are computed from: "of 190 of the 200 steps"; "" if that is not known."""
    counted, total = diagnosis.counted, diagnosis.steps
    if not counted:
        return ""
    if total == 1:
        return "of the only step, the first, with all that start-up costs"
    return f"of {counted:,} of the {total:,} steps" if counted < total else f"of all {total:,} steps"


def asides(diagnosis: Diagnosis, evidence: Evidence | None) -> list[tuple[str, str]]:
    """Return labelled lines to show beside the phases: steady step, pauses, a batch's stages, use of the machine."""
    lines = [
        ("steady", step_line(diagnosis)),
        ("pauses", _pauses(diagnosis)),
        ("outliers", _outliers(diagnosis)),
        ("trend", _trend(diagnosis)),
        ("batch", stage_line(evidence)),
        ("lines", hot_lines(evidence)),
        ("used", use_line(evidence)),
    ]
    return [(label, line) for label, line in lines if line]


def _pauses(diagnosis: Diagnosis) -> str:
    """Return a line on start-up, the first step and the waits at epoch starts."""
    pauses, parts = diagnosis.pauses, []
    if _positive(pauses.start_up):
        parts.append(f"start-up {words.duration(pauses.start_up)}")
    if _positive(pauses.first_step):
        length = words.duration(pauses.first_step)
        parts.append(f"first step {length}{_times_the_median(pauses.first_step, diagnosis.median)}")
    waits = [wait for wait in pauses.epoch_starts if _positive(wait)]
    if waits:
        epochs = f"{len(waits)} epochs" if len(waits) > 1 else "the epoch"
        parts.append(f"{words.duration(statistics.fmean(waits))} of waiting as {epochs} began")
    return ", ".join(parts)


def _outliers(diagnosis: Diagnosis) -> str:
    """Return a line on steps over three times as long as the median."""
    outliers = [(step, seconds) for step, seconds in diagnosis.pauses.outliers if _positive(seconds)]
    if not outliers:
        return ""
    step, longest = max(outliers, key=lambda outlier: outlier[1])
    total = words.duration(sum(seconds for _, seconds in outliers))
    if len(outliers) == 1:
        return f"step {step} took {total}, over three times the median"
    return f"{len(outliers)} steps over three times the median, {total} in all; step {step}: {words.duration(longest)}"


def _trend(diagnosis: Diagnosis) -> str:
    """Return a line on how much steps became slower or faster, if by 5 % or more."""
    trend = diagnosis.pauses.trend
    if not words.known(trend) or abs(trend) < 0.05:
        return ""
    return f"steps became {words.percent(abs(trend))} {'slower' if trend > 0 else 'faster'} from first quarter to last"


def _times_the_median(seconds: float, median: float) -> str:
    return f" ({seconds / median:,.0f} times the median)" if _positive(median) and seconds >= 3 * median else ""


def hot_lines(evidence: Evidence | None) -> str:
    """Return the lines of the script that take most of the step: "train.py:31 (backward) 52 %"; "" if not sampled."""
    if evidence is None or sum(line.looks for line in evidence.lines) < _FEWEST_SAMPLES:
        return ""
    shown = []
    # A line has two entries if it was sampled both with and without library code below it: add their shares up.
    lines: dict[tuple[str, str], SampledLine] = {}
    for line in evidence.lines:
        key = (line.where, line.phase)
        lines[key] = dataclasses.replace(line, share=line.share + lines[key].share) if key in lines else line
    hottest = sorted((line for line in lines.values() if line.share >= _HOT_SHARE), key=lambda line: -line.share)
    for line in hottest[:_MOST_LINES]:
        file, number = split_place(line.where)
        doing = f"{line.function}()" if line.phase == "other" and line.function else words.phase(line.phase)
        shown.append(words.clean(f"{Path(file).name}:{number} ({doing}) {words.percent(line.share)}"))
    return ", ".join(shown)


def stage_line(evidence: Evidence | None) -> str:
    """Return a line on the stages of the training loader's batch, in one process; "" if they were not sampled."""
    if evidence is None:
        return ""
    train = [index for index, loader in enumerate(evidence.loaders) if loader.role == "train"]
    stages = next((sampled for sampled in evidence.stages if not train or sampled.loader in train), None)
    if stages is None or not _positive(stages.seconds):
        return ""
    timed = stage_parts(stages)
    parts = [f"{name} {_share(seconds / stages.seconds)}" for name, seconds in timed]
    return f"{words.duration(stages.seconds)} in one process: {', '.join(parts)}"


def stage_parts(stages: Stages) -> list[tuple[str, float]]:
    """Return the stages that took any time, with their seconds per batch."""
    parts = {"own code" if name == "other" else name: seconds for name, seconds in stages.by_name.items()}
    return [(name, seconds) for name, seconds in parts.items() if _positive(seconds)]


def use_line(evidence: Evidence | None) -> str:
    """Return a line on the use of the machine; "" if it was not sampled."""
    if evidence is None:
        return ""
    use, parts = evidence.used, []
    if cpu := finite(use.cpu):
        parts.append(f"{statistics.fmean(cpu):.1f} of {words.count(evidence.machine.cores, 'core')}")
    if peak := process_peak(evidence):
        parts.append(f"at most {words.size(peak)} of {words.size(evidence.machine.memory_bytes)} memory")
    for number, gpu in enumerate(use.gpus):
        name = f"GPU {number}" if len(use.gpus) > 1 else "GPU"
        if busy := finite(gpu.busy):
            parts.append(f"{name} {words.percent(statistics.fmean(busy))} busy")
        if memory := finite(gpu.memory):
            parts.append(f"{name} memory at most {words.size(int(max(memory)))} of {words.size(gpu.memory_total)}")
    return ", ".join(parts)


def finite(values: Sequence[float] | Sequence[int]) -> list[float]:
    """Return the values that are finite."""
    return [float(value) for value in values if words.known(value)]


def techniques(diagnosis: Diagnosis) -> list[str]:
    """Return the techniques that cure findings that cost time, the worst finding's first."""
    costly = [
        finding
        for finding in worst_first(diagnosis.findings)
        if finding.technique and finding.severity is not Severity.NOTE
    ]
    return list(dict.fromkeys(words.clean(finding.technique) for finding in costly))
