"""Render a diagnosis as one HTML page that opens offline: no scripts, and no fonts or images from elsewhere."""

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

_MOST_ROWS = 15  # rows in the tables of layers and operators
_DEFAULTS = {
    "groups": 1,
    "stride": 1,
    "dilation": 1,
    "padding": 0,
    "num_layers": 1,
}  # torch's defaults, not worth showing
_VERDICT_CLASSES = {"none": "calm", "untrained": "unclear", "loader": "calm"}  # style class of a verdict; else "bound"


def render(diagnosis: Diagnosis, evidence: Evidence | None) -> str:
    """Return the whole page as HTML.

    Args:
        diagnosis: The diagnosis to show.
        evidence: The evidence it was made from, for charts over time; None if it is no longer there.
    """
    findings = worst_first(diagnosis.findings)
    phases = wording.phase_rows(diagnosis)
    page = environment(TEMPLATES).get_template("doctor.html.j2")
    return page.render(
        diagnosis=diagnosis,
        evidence=evidence,
        verdict_class=_VERDICT_CLASSES.get(diagnosis.verdict.resource, "bound"),
        phases=phases,
        step=sum(row.seconds for row in phases),
        figures=figures(diagnosis, evidence),
        costly=[finding for finding in findings if finding.severity is not Severity.NOTE],
        notes=[finding for finding in findings if finding.severity is Severity.NOTE],
        unseen=_unseen(diagnosis, evidence),
        excerpt=lambda finding: excerpt(finding.file, finding.line, diagnosis.created),
        layers=hottest_layers(evidence),
        operators=hottest_operators(evidence),
        bench=diagnosis.loader_bench,
        loader_bench=loader_bench,
        flame=flame_graph.draw(diagnosis.loader_bench.flame) if diagnosis.loader_bench else "",
        charts=charts,
        timeline=timeline,
        wording=wording,
        words=words,
        sizes=_sizes,
    )


def write(diagnosis: Diagnosis, evidence: Evidence | None, path: Path) -> None:
    """Write the page, atomically.

    Args:
        diagnosis: The diagnosis to show.
        evidence: The evidence it was made from, for charts over time; None if it is no longer there.
        path: The file to write.

    Raises:
        HastenError: The folder cannot be written to.
    """
    write_whole(render(diagnosis, evidence), path)


def figures(diagnosis: Diagnosis, evidence: Evidence | None) -> list[Figure]:
    """Return the key figures at the top of the page: step, its longest phase, first step, use of the machine."""
    shown = []
    if diagnosis.step > 0:
        detail = wording.step_line(diagnosis).partition(", ")[2]
        shown.append(Figure("a steady step", words.duration(diagnosis.step), detail))
    phases = wording.phase_rows(diagnosis)
    if phases:
        most = max(phases, key=lambda row: row.seconds)
        shown.append(Figure("most of it", most.share, f"{most.label}, {words.duration(most.seconds)} a step"))
    if words.known(diagnosis.pauses.first_step):
        start_up = words.duration(diagnosis.pauses.start_up)
        shown.append(Figure("first step", words.duration(diagnosis.pauses.first_step), f"after {start_up} of start-up"))
    if evidence is not None:
        shown += _used(evidence)
    return shown


def _used(evidence: Evidence) -> list[Figure]:
    """Return figures on the use of the machine, as far as it was sampled."""
    use, shown = evidence.used, []
    cpu = wording.finite(use.cpu)
    if cpu:
        cores = words.count(evidence.machine.cores, "core")
        shown.append(Figure("CPU", f"{statistics.fmean(cpu):.1f}", f"of {cores}, on average"))
    busy = [(gpu.name, wording.finite(gpu.busy)) for gpu in use.gpus]
    shown += [Figure("GPU busy", words.percent(statistics.fmean(shares)), name) for name, shares in busy if shares]
    if peak := process_peak(evidence):
        shown.append(Figure("peak memory", words.size(peak), f"of {words.size(evidence.machine.memory_bytes)}"))
    if evidence.peak_gpu_bytes:
        total = next((gpu.memory_total for gpu in use.gpus), 0)
        shown.append(
            Figure("peak GPU memory", words.size(evidence.peak_gpu_bytes), f"of {words.size(total)}" if total else "")
        )
    return shown


def hottest_layers(evidence: Evidence | None) -> list[Layer]:
    """Return the timed layers, slowest first, at most 15."""
    timed = [
        layer for layer in (evidence.layers if evidence else ()) if words.known(layer.seconds) and layer.seconds > 0
    ]
    return sorted(timed, key=lambda layer: -layer.seconds)[:_MOST_ROWS]


def hottest_operators(evidence: Evidence | None) -> list[Operator]:
    """Return the operators, slowest on the GPU first, then by time on the CPU; at most 15."""
    sampled = evidence.sampled if evidence else None
    timed = [op for op in (sampled.operators if sampled else ()) if words.known(op.seconds + op.device_seconds)]
    return sorted(timed, key=lambda op: (-op.device_seconds, -op.seconds))[:_MOST_ROWS]


def _unseen(diagnosis: Diagnosis, evidence: Evidence | None) -> list[str]:
    """Return sentences on what could not be observed, each reason once."""
    sentences = list(diagnosis.unseen)
    for reason in evidence.skipped if evidence else ():
        if not any(reason in sentence for sentence in sentences):
            sentences.append(reason)
    return sentences


def _sizes(layer: Layer) -> str:
    """Return a layer's sizes as text, without torch's defaults: `in channels 3, out channels 64, kernel size 3`."""
    sizes = [(name, value) for name, value in layer.sizes.items() if value != _DEFAULTS.get(name)]
    return words.clean(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in sizes))


_AROUND = 3  # lines to show before and after a finding's line
_LARGEST = 2 << 20  # bytes of a file that is read for an excerpt
_WIDEST = 160  # characters of a line


@dataclass(frozen=True)
class Excerpt:
    """Numbered lines of a file.

    Attributes:
        lines: Number and text of each line.
        marked: Number of the finding's line.
        changed: Whether the file was changed after the run, so that the finding's line may have moved.
    """

    lines: tuple[tuple[int, str], ...]
    marked: int
    changed: bool = False


def excerpt(file: str, line: int, created: str = "") -> Excerpt | None:
    """Return the lines around `file:line`; None if that is not a readable Python file with such a line.

    Args:
        file: The file as a finding names it. Only `.py` files are opened, since the evidence may come from someone else
            and could name any file.
        line: Line number, from 1.
        created: ISO 8601 time of the diagnosis; "" if unknown.
    """
    if not file or line < 1 or "\0" in file:
        return None
    path = Path(file)
    if not path.is_absolute() and not path.is_file():  # a library's file is named from its package: "torch/nn/..."
        candidates = (Path(folder, file) for folder in folders_of_packages())
        path = next((candidate for candidate in candidates if candidate.is_file()), path)
    try:
        if path.suffix != ".py" or not path.is_file() or path.stat().st_size > _LARGEST:
            return None
        with tokenize.open(path) as opened:  # in the encoding that the file declares
            lines = opened.read().split("\n")
        changed = bool(created) and path.stat().st_mtime > datetime.fromisoformat(created).timestamp()
    # In turn: not readable; unknown encoding declared; not in that encoding, or `created` is no time.
    except (OSError, SyntaxError, ValueError):
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
