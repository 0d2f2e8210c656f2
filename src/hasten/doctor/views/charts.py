"""Draw evidence as SVG: a step's phases, memory, losses. Each function returns empty markup if nothing is there."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hasten.doctor.views.wording import PhaseRow
from hasten.evidence import Evidence
from hasten.report import words
from hasten.report.drawing import Point, Scale, area, columns, dot, line, phase_class, rect, rows, stretched, svg

MOST = 300  # points, columns or marks in one chart: keeps the page small, and more could not be told apart

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """A series of a chart: its name, its class in the style sheet, and its points (time or step, value)."""

    name: str
    kind: str
    points: Points


def phase_bar(phases: Sequence[PhaseRow]) -> Markup:
    """Draw a steady step as one bar of its phases, one after the other."""
    total = sum(row.seconds for row in phases)
    if not total > 0:
        return Markup()
    scale, parts, reached = Scale(0.0, total), [], 0.0
    for row in phases:
        description = f"{row.label}: {words.alike(row.seconds, total)}, {row.share}"
        parts.append(rect(phase_class(row.name), (scale(reached), scale(reached + row.seconds)), 0, 30, description))
        reached += row.seconds
    description = ", ".join(f"{row.label} {row.share}" for row in phases)
    return svg("Where a steady step's time goes", description, 30, parts)


def thinned(points: Points, most: int = MOST, choose: Callable[[list[float]], float] = statistics.fmean) -> Points:
    """Return at most `most` points, each for a group of consecutive points; points without a finite value are dropped.

    Args:
        points: The points, in order.
        most: Greatest number of points to return.
        choose: Returns a group's value from its values.
    """
    points = [(at, value) for at, value in points if words.known(at) and words.known(value)]
    group_size = max(1, math.ceil(len(points) / most))
    groups = [points[begin : begin + group_size] for begin in range(0, len(points), group_size)]
    return [(group[len(group) // 2][0], choose([value for _, value in group])) for group in groups]


def memory_charts(evidence: Evidence) -> list[Markup]:
    """Draw memory by step with a dashed line at its peak: of the process, and allocated on the GPU."""
    on_cpu: Points = [(point.step, point.rss) for point in evidence.memory if point.rss > 0]
    on_gpu: Points = [(point.step, point.gpu) for point in evidence.memory if point.gpu is not None]
    drawn = [
        _memory("Memory of the process", "c-main", on_cpu, evidence.peak_memory_bytes),
        _memory("Memory allocated on the GPU", "c-gpu", on_gpu, evidence.peak_gpu_bytes or 0),
    ]
    return [chart for chart in drawn if chart]


def _memory(title: str, kind: str, points: Points, peak: int) -> Markup:
    points = thinned(points, choose=max)  # a peak must not disappear in a mean
    highest = max([peak, *(amount for _, amount in points)])
    if len(points) < 2 or not highest > 0:
        return Markup()
    unit, name = (1 << 30, "GiB") if highest >= 1 << 30 else (1 << 20, "MiB")
    down = Scale(0.0, highest / unit * 1.05, near=100.0, far=0.0)
    across = Scale(points[0][0], points[-1][0])
    drawn = [line(f"stroke {kind}", [(across(step), down(amount / unit)) for step, amount in points], title)]
    if peak > 0:
        drawn.append(line(f"stroke peak {kind}", [(0, down(peak / unit)), (100, down(peak / unit))], "peak"))
    height = 150.0
    parts = [*rows(down, height, lambda amount: f"{amount:g} {name}"), stretched(height, drawn)]
    parts += columns(across, height, lambda step: f"{step:,.0f}")
    description = f"from {words.size(int(points[0][1]))} to {words.size(int(points[-1][1]))}"
    return svg(title, f"{description}, peak {words.size(peak)}" if peak > 0 else description, height + 22, parts)


def loss_chart(evidence: Evidence) -> Markup:
    """Draw the training loss by step: the mean of each group of steps, a band of its range, validation as dots.

    The scale is logarithmic if losses are positive and span more than a factor of 30.
    """
    points = [(evidence.number(index), loss) for index, loss in enumerate(evidence.losses) if loss is not None]
    mean = thinned([(float(step), loss) for step, loss in points])
    if len(mean) < 2:
        return Markup()
    low, high = (thinned([(float(s), v) for s, v in points], choose=choose) for choose in (min, max))
    checks = [(float(check.step), check.loss) for check in evidence.validations if words.known(check.loss)][:MOST]
    # A few outliers, as the first losses often are, must not flatten the rest of the curve: if the greatest loss is far
    # above the 95th percentile of the means, the scale ends at three times that and losses above it are cut off.
    usual = statistics.quantiles([value for _, value in mean], n=20)[-1] if len(mean) > 20 else math.inf
    values = [value for _, value in [*low, *high, *checks]]
    lowest, highest = min(values), max(values)
    if highest - lowest > 20 * (usual - lowest):
        highest = lowest + 3 * (usual - lowest)
    log = lowest > 0 and highest / lowest > 30
    down = Scale(lowest, highest, log=log, near=96, far=6)
    across = Scale(0.0, max(step for step, _ in [*mean, *checks]))

    def placed(line: Points) -> list[Point]:
        return [(across(step), down(min(max(value, lowest), highest))) for step, value in line]

    drawn = [area("band", placed([*high, *reversed(low)])), line("stroke c-main", placed(mean), "training loss")]
    height = 200.0
    parts = rows(down, height, lambda loss: f"{loss:g}")
    parts.append(stretched(height, drawn))
    for step, loss in checks:
        y = down(min(max(loss, lowest), highest)) * height / 100
        parts.append(dot("dot-check", across(step), y, f"validation at step {step:,.0f}: {words.number(loss)}"))
    parts += columns(across, height, lambda step: f"{step:,.0f}")
    description = f"from {words.number(mean[0][1])} to {words.number(mean[-1][1])}"
    return svg("Loss by step" + (", logarithmic" if log else ""), description, height + 22, parts)
