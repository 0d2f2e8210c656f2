"""A diagnosis as one HTML page that opens offline: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import statistics
import tokenize
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hasten.doctor.verdict.diagnosis import Diagnosis
from hasten.doctor.views import TEMPLATES, charts, flame_graph, loader_bench, timeline, wording
from hasten.evidence import Evidence, Layer, Operator, Severity
from hasten.evidence.finding import worst_first
from hasten.evidence.libraries import folders_of_packages
from hasten.evidence.weigh import process_peak
from hasten.report import words
from hasten.report.page import environment, write_whole
from hasten.report.words import Figure

_MOST_ROWS = 15
_USUAL = {"groups": 1, "stride": 1, "dilation": 1, "padding": 0, "num_layers": 1}
_KINDS = {"none": "calm", "untrained": "unclear", "loader": "calm"}


def render(diagnosis: Diagnosis, evidence: Evidence | None) -> str:
    """The whole page as text."""
    findings = worst_first(diagnosis.findings)
    phases = wording.phase_rows(diagnosis)
    page = environment(TEMPLATES).get_template("doctor.html.j2")
    return page.render(
        found=diagnosis,
        seen=evidence,
        kind=_KINDS.get(diagnosis.verdict.resource, "bound"),
        phases=phases,
        step=sum(row.seconds for row in phases),
        figures=figures(diagnosis, evidence),
        costly=[one for one in findings if one.severity is not Severity.NOTE],
        notes=[one for one in findings if one.severity is Severity.NOTE],
        unseen=_unseen(diagnosis, evidence),
        excerpt=lambda one: excerpt(one.file, one.line, diagnosis.created),
        layers=hottest_layers(evidence),
        operators=hottest_operators(evidence),
        bench=diagnosis.loader_bench,
        benches=loader_bench,
        flame=flame_graph.draw(diagnosis.loader_bench.flame) if diagnosis.loader_bench else "",
        charts=charts,
        timeline=timeline,
        about=wording,
        words=words,
        sizes=_sizes,
    )


def write(diagnosis: Diagnosis, evidence: Evidence | None, path: Path) -> None:
    """Write the page, whole or not at all.

    Args:
        diagnosis: What to show.
        evidence: What it was made from, for everything over time; None where it is gone.
        path: Where to.

    Raises:
        HastenError: The folder cannot be written to.
    """
    write_whole(render(diagnosis, evidence), path)


def figures(diagnosis: Diagnosis, evidence: Evidence | None) -> list[Figure]:
    """The few figures that stand first."""
    found = []
    if diagnosis.step > 0:
        rest = wording.step_line(diagnosis).partition(", ")[2]
        found.append(Figure("a steady step", words.duration(diagnosis.step), rest))
    phases = wording.phase_rows(diagnosis)
    if phases:
        most = max(phases, key=lambda row: row.seconds)
        found.append(Figure("most of it", most.share, f"{most.label}, {words.duration(most.seconds)} a step"))
    if words.known(diagnosis.pauses.first_step):
        before = words.duration(diagnosis.pauses.start_up)
        found.append(Figure("first step", words.duration(diagnosis.pauses.first_step), f"after {before} of start-up"))
    if evidence is not None:
        found += _used(evidence)
    return found


def _used(evidence: Evidence) -> list[Figure]:
    use, found = evidence.used, []
    cpu = wording.finite(use.cpu)
    if cpu:
        cores = words.count(evidence.machine.cores, "core")
        found.append(Figure("CPU", f"{statistics.fmean(cpu):.1f}", f"of {cores}, on average"))
    busy = [(gpu.name, wording.finite(gpu.busy)) for gpu in use.gpus]
    found += [Figure("GPU busy", words.percent(statistics.fmean(shares)), name) for name, shares in busy if shares]
    if peak := process_peak(evidence):
        found.append(Figure("peak memory", words.size(peak), f"of {words.size(evidence.machine.memory_bytes)}"))
    if evidence.peak_gpu_bytes:
        total = next((gpu.memory_total for gpu in use.gpus), 0)
        found.append(
            Figure("peak GPU memory", words.size(evidence.peak_gpu_bytes), f"of {words.size(total)}" if total else "")
        )
    return found


def hottest_layers(evidence: Evidence | None) -> list[Layer]:
    """The layers that took most time, where that was measured."""
    timed = [one for one in (evidence.layers if evidence else ()) if words.known(one.seconds) and one.seconds > 0]
    return sorted(timed, key=lambda one: -one.seconds)[:_MOST_ROWS]


def hottest_operators(evidence: Evidence | None) -> list[Operator]:
    """The operators that took most time, on the device where there is one."""
    sampled = evidence.sampled if evidence else None
    known = [one for one in (sampled.operators if sampled else ()) if words.known(one.seconds + one.device_seconds)]
    return sorted(known, key=lambda one: (-one.device_seconds, -one.seconds))[:_MOST_ROWS]


def _unseen(diagnosis: Diagnosis, evidence: Evidence | None) -> list[str]:
    """Return what could not be seen, each reason once."""
    sentences = list(diagnosis.unseen)
    for reason in evidence.skipped if evidence else ():
        if not any(reason in sentence for sentence in sentences):
            sentences.append(reason)
    return sentences


def _sizes(layer: Layer) -> str:
    """A layer's sizes in short, without what is usual: `in channels 3, out channels 64, kernel size 3`."""
    sizes = [(name, value) for name, value in layer.sizes.items() if value != _USUAL.get(name)]
    return words.clean(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in sizes))


_AROUND = 3
_LARGEST = 2 << 20
_WIDEST = 160


@dataclass(frozen=True)
class Excerpt:
    """Numbered lines; `marked` is the number of the one that matters.

    `changed`: the file was written after the run, so the line may be another one.
    """

    lines: tuple[tuple[int, str], ...]
    marked: int
    changed: bool = False


def excerpt(file: str, line: int, created: str = "") -> Excerpt | None:
    """The lines around `file:line`, if that is a Python file that can be read and has such a line.

    Args:
        file: As a finding names it; nothing but `.py` files is opened, since evidence may come from elsewhere.
        line: From 1.
        created: ISO 8601 time of the diagnosis.
    """
    if not file or line < 1 or "\0" in file:
        return None
    path = Path(file)
    if not path.is_absolute() and not path.is_file():  # a library's, which is named from its package on
        among = (Path(folder, file) for folder in folders_of_packages())
        path = next((one for one in among if one.is_file()), path)
    try:
        if path.suffix != ".py" or not path.is_file() or path.stat().st_size > _LARGEST:
            return None
        with tokenize.open(path) as opened:  # in the encoding that the file itself names
            lines = opened.read().split("\n")
        changed = bool(created) and path.stat().st_mtime > datetime.fromisoformat(created).timestamp()
    except (OSError, SyntaxError, ValueError):  # not readable, another encoding than it says, or no such time
        return None
    if line > len(lines):
        return None
    first = max(1, line - _AROUND)
    shown = [(number, _cut(words.code(text))) for number, text in enumerate(lines[first - 1 : line + _AROUND], first)]
    while shown and not shown[-1][1] and shown[-1][0] != line:
        shown.pop()
    return Excerpt(tuple(shown), line, changed)


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
