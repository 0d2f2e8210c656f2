"""Make a diagnosis from evidence: verdict, steady step by phase, pauses, findings, and what was not observed."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence

import hasten
from hasten.doctor.findings import FINDINGS
from hasten.doctor.rule import Rule, same_place
from hasten.doctor.verdict.diagnosis import Diagnosis, Pauses
from hasten.doctor.verdict.machine_advice import advice
from hasten.doctor.verdict.not_observed import unseen
from hasten.doctor.verdict.resource import verdict
from hasten.evidence import PHASES, Evidence, Finding, HowKnown, Phase, Severity
from hasten.evidence.finding import worst_first

_MOST_BLOCKS = 24  # stretches that the steady steps are divided into, at most


def diagnose(
    evidence: Evidence,
    source_findings: Sequence[Finding] = (),
    unseen_besides: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Diagnosis:
    """Return the diagnosis of a run.

    Args:
        evidence: The run's evidence. Any evidence gives a diagnosis, even if it has no steps.
        source_findings: Findings from the script's source code.
        unseen_besides: What could not be observed, with the reason.
        notes: What was done to the run, such as that it was cut.
    """
    failed: list[str] = []
    findings = merged(
        _without_explained(list(_findings(evidence, failed))),
        [finding for finding in source_findings if FINDINGS.get(finding.name, Rule).holds(finding, evidence)],
    )
    phases = mean_phases(evidence)
    lengths = [sum(evidence.step_phases[index]) for index in evidence.steady()]
    return Diagnosis(
        command=evidence.command,
        verdict=verdict(evidence, phases),
        phases=phases,
        step=sum(phases.values()),
        median=statistics.median(lengths) if lengths else 0.0,
        spread=_spread(lengths),
        steps=evidence.steps or len(evidence.step_phases),
        counted=len(lengths),
        blocks=_blocks(lengths),
        pauses=pauses(evidence),
        findings=tuple(findings),
        machine=advice(evidence, phases),
        unseen=(*unseen_besides, *unseen(evidence)),
        notes=(*notes, *failed),
        ended=evidence.ended,
        error=evidence.error,
        peak_memory_bytes=evidence.peak_memory_bytes,
        peak_gpu_bytes=evidence.peak_gpu_bytes,
        loader_bench=evidence.loader_bench,
        ran_on=evidence.machine,
        torch=evidence.flags.torch,
        hasten=hasten.__version__,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def mean_phases(evidence: Evidence) -> dict[str, float]:
    """Return the mean seconds of a steady step by phase, which add up to the mean step; empty without steps."""
    return {name: evidence.mean(phase) for name, phase in zip(PHASES, Phase, strict=True)} if evidence.steady() else {}


def _spread(lengths: Sequence[float]) -> float:
    """Return the interquartile range (seconds)."""
    if len(lengths) < 2:
        return 0.0
    low, _, high = statistics.quantiles(lengths, n=4, method="inclusive")
    return high - low


def _blocks(lengths: Sequence[float]) -> tuple[float, ...]:
    """Return the means of up to `_MOST_BLOCKS` stretches of equally many steps.

    Neighbouring steps are correlated, so an interval from single steps would be too narrow.
    """
    count = min(_MOST_BLOCKS, len(lengths))
    ends = [len(lengths) * number // count for number in range(count + 1)] if count else []
    return tuple(statistics.fmean(lengths[begin:end]) for begin, end in itertools.pairwise(ends))


def _findings(evidence: Evidence, failed: list[str]) -> Iterable[Finding]:
    """Yield the findings of every rule, and add an error message to `failed` for each rule that raises."""
    for name, rule in FINDINGS.items():
        try:
            yield from rule.findings(evidence)
        except Exception as error:  # a rule that raises must not hide the rest
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            failed.append(f"the finding {name} failed, which is a fault of hasten's: {reason}")


def _without_explained(findings: list[Finding]) -> list[Finding]:
    """Drop findings that only say a line takes time (`gives_way`), if another finding explains that line.

    The other one must be on the same line and worth at least half as much.
    """

    def explained(finding: Finding) -> bool:
        return any(
            other.name != finding.name
            and (other.file, other.line) == (finding.file, finding.line)
            and other.worth >= finding.worth / 2
            for other in findings
            if other.worth is not None and finding.worth is not None
        )

    return [finding for finding in findings if not FINDINGS.get(finding.name, Rule).gives_way or not explained(finding)]


def merged(measured: Sequence[Finding], read: Sequence[Finding]) -> list[Finding]:
    """Merge the findings of a run and of its source code, worst first.

    If both have a finding, the measured one is kept, and takes its place from the source if it has none. A finding that
    is only in the source becomes a note: whether it costs anything was not measured.

    Args:
        measured: Findings of the run.
        read: Findings of the source.
    """
    findings = []
    used: set[int] = set()
    for finding in measured:
        same_rule = [(number, other) for number, other in enumerate(read) if other.name == finding.name]
        used.update(
            number for number, other in same_rule if not finding.file or same_place(finding, other.file, other.line)
        )
        # For such a rule the run knows only where the problem shows (kept graphs: the backward), the source its cause.
        if FINDINGS.get(finding.name, Rule).placed_by_code:
            same_file = [
                (number, other) for number, other in same_rule if other.file.rpartition("/")[2] in finding.file
            ]
            used.update(number for number, _ in same_file)
            if same_file:
                symptom = f"it showed at the backward in line {finding.line}"
                finding = dataclasses.replace(finding, line=same_file[0][1].line, details=(*finding.details, symptom))
        elif not finding.file and same_rule:
            finding = dataclasses.replace(finding, file=same_rule[0][1].file, line=same_rule[0][1].line)
        findings.append(finding)
    for number, finding in enumerate(read):
        if number not in used:
            findings.append(dataclasses.replace(finding, severity=Severity.NOTE, how_known=HowKnown.READ))
    return worst_first(findings)


_OUTLIER = 3.0  # a longer step than this many medians is an outlier
_MOST = 20  # outliers to report
_FOR_A_TREND = 20  # steady steps needed to report a trend


def pauses(evidence: Evidence) -> Pauses:
    """Return the pauses of a run; all fields have their defaults if there are no steps."""
    lengths = evidence.step_seconds
    if not lengths:
        return Pauses()
    from_the_start = evidence.number(0) == 0  # evidence from a live file holds only the last steps
    process_start = min([0.0, *evidence.used.at[:1]])
    return Pauses(
        start_up=evidence.step_start[0] - process_start if from_the_start else math.nan,
        first_step=lengths[0] if from_the_start else math.nan,
        epoch_starts=tuple(epoch.first - epoch.start for epoch in evidence.passes if epoch.trained),
        outliers=_outliers(evidence, lengths),
        trend=_trend([lengths[index] for index in evidence.steady()]),
    )


def _outliers(evidence: Evidence, lengths: list[float]) -> tuple[tuple[int, float], ...]:
    """Return (number, seconds) of the longest outliers, in order of the steps.

    The first step and disturbed steps do not count.
    """
    steady = evidence.steady()
    if not steady:
        return ()
    bound = _OUTLIER * statistics.median(lengths[index] for index in steady)
    disturbed = set(evidence.disturbed)
    long = [
        (evidence.number(index), lengths[index])
        for index in range(1, len(lengths))
        if lengths[index] > bound > 0 and evidence.number(index) not in disturbed
    ]
    return tuple(sorted(sorted(long, key=lambda outlier: -outlier[1])[:_MOST]))


def _trend(steady: list[float]) -> float:
    """Return the relative change of the median step from the first to the last quarter of the run."""
    if len(steady) < _FOR_A_TREND:
        return 0.0
    quarter = len(steady) // 4
    first, last = statistics.median(steady[:quarter]), statistics.median(steady[-quarter:])
    trend = last / first - 1 if first > 0 else 0.0
    return trend if math.isfinite(trend) else 0.0
