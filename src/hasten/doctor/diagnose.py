"""Evidence -> diagnosis: the verdict, the steady step by phase, the pauses, the findings, and what was not seen."""

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

_MOST_BLOCKS = 24


def diagnose(
    evidence: Evidence,
    source_findings: Sequence[Finding] = (),
    unseen_besides: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Diagnosis:
    """Say what a run's evidence shows.

    Args:
        evidence: What it left behind; any evidence gives a diagnosis, an empty one too.
        source_findings: What was read from the script's code.
        unseen_besides: What could not be listened to, and why.
        notes: What was done to the run.
    """
    failed: list[str] = []
    findings = merged(
        _each_once(list(_findings(evidence, failed))),
        [one for one in source_findings if FINDINGS.get(one.name, Rule).holds(one, evidence)],
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
    """Mean seconds of a steady step by phase; nothing without steps. They add up to the mean step."""
    return {name: evidence.mean(phase) for name, phase in zip(PHASES, Phase, strict=True)} if evidence.steady() else {}


def _spread(lengths: Sequence[float]) -> float:
    if len(lengths) < 2:
        return 0.0
    low, _, high = statistics.quantiles(lengths, n=4, method="inclusive")
    return high - low


def _blocks(lengths: Sequence[float]) -> tuple[float, ...]:
    """Means of stretches of equally many steps: neighbours are alike, so single steps would seem to tell more."""
    count = min(_MOST_BLOCKS, len(lengths))
    ends = [len(lengths) * number // count for number in range(count + 1)] if count else []
    return tuple(statistics.fmean(lengths[begin:end]) for begin, end in itertools.pairwise(ends))


def _findings(evidence: Evidence, failed: list[str]) -> Iterable[Finding]:
    """Yield the findings of every rule; one that fails is named in `failed`."""
    for name, rule in FINDINGS.items():
        try:
            yield from rule.findings(evidence)
        except Exception as error:  # a rule that raises must not hide the rest
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            failed.append(f"the finding {name} failed, which is a fault of hasten's: {why}")


def _each_once(found: list[Finding]) -> list[Finding]:
    """Without what is only known to take time where another finding says why."""

    def explained(one: Finding) -> bool:
        return any(
            other.name != one.name and (other.file, other.line) == (one.file, one.line) and other.worth >= one.worth / 2
            for other in found
            if other.worth is not None and one.worth is not None
        )

    return [one for one in found if not FINDINGS.get(one.name, Rule).gives_way or not explained(one)]


def merged(measured: Sequence[Finding], read: Sequence[Finding]) -> list[Finding]:
    """Findings of the run and of its source, each once, worst first.

    Of one that is in both the measured one is kept, and takes its place from the source where it has none itself. One
    that is only in the source stays as a note: whether it costs anything was not measured.
    """
    findings = []
    used: set[int] = set()
    for finding in measured:
        here = [(number, other) for number, other in enumerate(read) if other.name == finding.name]
        used.update(number for number, other in here if not finding.file or same_place(finding, other.file, other.line))
        if FINDINGS.get(
            finding.name, Rule
        ).placed_by_code:  # the run knows where it showed, the source where it was made
            same = [(number, other) for number, other in here if other.file.rpartition("/")[2] in finding.file]
            used.update(number for number, _ in same)
            if same:
                showed = f"it showed at the backward in line {finding.line}"
                finding = dataclasses.replace(finding, line=same[0][1].line, details=(*finding.details, showed))
        elif not finding.file and here:
            finding = dataclasses.replace(finding, file=here[0][1].file, line=here[0][1].line)
        findings.append(finding)
    for number, finding in enumerate(read):
        if number not in used:
            findings.append(dataclasses.replace(finding, severity=Severity.NOTE, how_known=HowKnown.READ))
    return worst_first(findings)


_OUTLIER = 3.0  # times the median
_MOST = 20
_FOR_A_TREND = 20  # steady steps


def pauses(evidence: Evidence) -> Pauses:
    """The pauses of a run; without steps only what can be told of its start."""
    lengths = evidence.step_seconds
    if not lengths:
        return Pauses()
    from_the_start = evidence.number(0) == 0  # a live file holds the last steps only
    began = min([0.0, *evidence.used.at[:1]])
    return Pauses(
        start_up=evidence.step_start[0] - began if from_the_start else math.nan,
        first_step=lengths[0] if from_the_start else math.nan,
        epoch_starts=tuple(over.first - over.start for over in evidence.passes if over.trained),
        outliers=_outliers(evidence, lengths),
        trend=_trend([lengths[index] for index in evidence.steady()]),
    )


def _outliers(evidence: Evidence, lengths: list[float]) -> tuple[tuple[int, float], ...]:
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
    return tuple(sorted(sorted(long, key=lambda one: -one[1])[:_MOST]))


def _trend(steady: list[float]) -> float:
    if len(steady) < _FOR_A_TREND:
        return 0.0
    quarter = len(steady) // 4
    first, last = statistics.median(steady[:quarter]), statistics.median(steady[-quarter:])
    trend = last / first - 1 if first > 0 else 0.0
    return trend if math.isfinite(trend) else 0.0
