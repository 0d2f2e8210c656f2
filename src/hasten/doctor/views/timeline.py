"""Draw a run over time as SVG: its steps, and below them the use of the machine, on the same time scale."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from hasten.doctor.views.charts import MOST, Series, thinned
from hasten.evidence import PHASES, Evidence, GpuUse
from hasten.report import words
from hasten.report.drawing import Point, Scale, area, line, phase_class, rect, rows, stretched, svg, text

_HEIGHT = 200.0  # height of the chart of steps
_STRIP_HEIGHT = 44.0  # height of a strip
_MOST_NAMED = 12  # epochs to label; with more the labels would overlap
# Distances between time marks, in seconds.
_TICK_STEPS = (30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 4 * 3600, 12 * 3600, 24 * 3600, 72 * 3600)


@dataclass(frozen=True)
class Column:
    """Consecutive steps drawn as one column.

    Attributes:
        first, last: Numbers of the first and last step.
        start, end: When the first began and the last ended.
        phases: Mean seconds of one step, by `PHASES`.
    """

    first: int
    last: int
    start: float
    end: float
    phases: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Mean seconds of one step."""
        return sum(self.phases)


def step_columns(evidence: Evidence, most: int = MOST) -> list[Column]:
    """Return the steps in at most `most` columns of equally many steps; the last column may have fewer."""
    steps = [
        (index, start, phases)
        for index, (start, phases) in enumerate(zip(evidence.step_start, evidence.step_phases, strict=False))
        if words.known(start) and all(map(words.known, phases))
    ]
    group_size = max(1, math.ceil(len(steps) / most))
    columns: list[Column] = []
    for begin in range(0, len(steps), group_size):
        group = steps[begin : begin + group_size]
        index, start, phases = group[-1]
        next_start = steps[begin + group_size][1] if begin + group_size < len(steps) else math.inf
        # Of a long run only every n-th step is kept: a kept step spans those that follow it, but never the next column.
        end = max(start, min(next_start, start + sum(phases) * max(1, evidence.every)))
        means = tuple(statistics.fmean(times) for times in zip(*(phases for _, _, phases in group), strict=False))
        first, last = evidence.number(group[0][0]), evidence.number(index)
        columns.append(Column(first, last, group[0][1], end, means))
    return columns


def time_scale(evidence: Evidence) -> Scale:
    """Return the time scale of all charts: the training, and a tenth of its length before it."""
    starts = [start for start in evidence.step_start if words.known(start)]
    ends = [time for time in (*evidence.used.at, evidence.ended_at) if words.known(time)]
    if not starts:
        return Scale(0.0, max([*ends, 1e-3]))
    last = max([*(column.end for column in step_columns(evidence)[-1:]), *_until(ends, starts)])
    span = max(last - starts[0], 1e-6)
    return Scale(max(0.0, starts[0] - span / 10), last)


def _until(ends: Iterable[float], starts: Sequence[float]) -> list[float]:
    """Return the ends that are not long after the last step: a script may do other things for hours after training."""
    room = (starts[-1] - starts[0]) / 4 + 1
    return [end for end in ends if starts[-1] <= end <= starts[-1] + room]


def timeline(evidence: Evidence) -> Markup:
    """Draw the steps over time, each as high as it was long, stacked by phase.

    Epochs, validation and disturbed steps are marked. Steps over three times the median are cut off and marked too.
    """
    steps = step_columns(evidence)
    if not steps:
        return Markup()
    across = time_scale(evidence)
    usual = statistics.median(column.seconds for column in steps)
    top = min(max(column.seconds for column in steps), 3 * usual) or 1e-9
    down = Scale(0.0, top, near=100.0, far=0.0)
    drawn = [
        _boxes(phase_class(PHASES[phase]), _phase_boxes(steps, phase, across, down))
        for phase in range(min(len(PHASES), *(len(column.phases) for column in steps)))
        if any(column.phases[phase] > 0 for column in steps)
    ]
    parts = [*_times(across, _HEIGHT + 6), *_validation_bands(evidence, across)]
    parts += [stretched(_HEIGHT, drawn), *rows(down, _HEIGHT, words.duration)]
    parts += [_tooltip(column, across) for column in steps]
    parts += [rect("over", _ends(column, across), 0, 4) for column in steps if column.seconds > top]
    parts += _epoch_marks(evidence, across)
    parts += _disturbed_marks(evidence, across)
    description = f"{words.count(evidence.steps, 'step')}, {words.duration(usual)} each at the median"
    return svg("Steps over time", description, _HEIGHT + 28, parts)


def _phase_boxes(steps: Sequence[Column], phase: int, across: Scale, down: Scale) -> list[tuple[float, ...]]:
    boxes: list[tuple[float, ...]] = []
    for column in steps:
        low = sum(column.phases[:phase])
        high = min(low + column.phases[phase], down.high)
        if high > low:
            start, end = _ends(column, across)
            boxes.append((start, end, down(high), down(low)))
    return boxes


def _ends(column: Column, across: Scale) -> Point:
    """Return the left and right end of a column in percent; at least as wide as can be seen."""
    start, end = across(column.start), across(column.end)
    return start, max(end, start + 0.08)


def _boxes(kind: str, boxes: Iterable[tuple[float, ...]]) -> Markup:
    drawn = "".join(f"M{x0:.2f} {y0:.2f}H{x1:.2f}V{y1:.2f}H{x0:.2f}Z" for x0, x1, y0, y1 in boxes)
    return Markup('<path class="{}" d="{}"/>').format(kind, drawn)


def _tooltip(column: Column, across: Scale) -> Markup:
    """Return an invisible box over a column that shows its phases as a tooltip."""
    single = column.first == column.last
    which = f"step {column.first}" if single else f"steps {column.first} to {column.last}, each"
    parts = [
        f"{words.phase(name)} {words.alike(seconds, column.seconds)}"
        for name, seconds in zip(PHASES, column.phases, strict=False)
        if seconds >= column.seconds / 200 and seconds > 0
    ]
    description = f"{which} {words.duration(column.seconds)}: {', '.join(parts)}"
    return rect("tooltip", _ends(column, across), 0, _HEIGHT, description)


def _validation_bands(evidence: Evidence, across: Scale) -> list[Markup]:
    """Return bands over the passes through validation loaders; without such passes, a mark per validation."""
    passes = [(run.start, run.end) for run in evidence.passes if not run.trained and _inside(run.start, across)]
    bands = [
        rect("mark-validation", (across(start), across(min(max(start, end), across.high))), 0, _HEIGHT, "validation")
        for start, end in passes[:MOST]
        if words.known(end)
    ]
    if bands:
        return bands
    return [
        rect(
            "mark-validation",
            (across(validation.at), across(validation.at) + 0.3),
            0,
            _HEIGHT,
            f"validation after step {validation.step}",
        )
        for validation in evidence.validations[:MOST]
        if _inside(validation.at, across)
    ]


def _epoch_marks(evidence: Evidence, across: Scale) -> list[Markup]:
    epochs = [epoch.start for epoch in evidence.passes if epoch.trained and _inside(epoch.start, across)]
    parts = []
    for number, start in enumerate(epochs[:MOST], 1):
        x = across(start)
        parts.append(rect("mark-epoch", (x, x + 0.12), 0, _HEIGHT, f"epoch {number} begins"))
        if len(epochs) <= _MOST_NAMED and x >= 8:  # further left, the label would cover that of the topmost grid line
            parts.append(text("tick halo", x, -4, f"epoch {number}"))
    return parts


def _disturbed_marks(evidence: Evidence, across: Scale) -> list[Markup]:
    starts, parts = evidence.step_start, []
    numbers = [evidence.number(index) for index in range(len(starts))]
    for first, last in runs(sorted(set(evidence.disturbed)))[:MOST]:
        at, after_it = bisect_left(numbers, first), bisect_right(numbers, last)
        if at == after_it or not _inside(starts[at], across):
            continue  # the evidence of a long run holds only every n-th step, and none of these
        begin = starts[at]
        end = starts[after_it] if after_it < len(starts) and words.known(starts[after_it]) else begin
        which = f"step {first}" if first == last else f"steps {first} to {last}"
        ends = (across(begin), max(across(end), across(begin) + 0.4))
        parts.append(rect("mark-disturbed", ends, _HEIGHT + 1, 4, f"{which}: looked into, not counted"))
    return parts


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers, as first and last.

    >>> runs([3, 4, 5, 9])
    [(3, 5), (9, 9)]
    """
    breaks = [index for index, (previous, current) in enumerate(pairwise(numbers), 1) if current != previous + 1]
    firsts, lasts = [0, *breaks], [*breaks, len(numbers)]
    return [(numbers[first], numbers[last - 1]) for first, last in zip(firsts, lasts, strict=True)] if numbers else []


def _inside(time: float, across: Scale) -> bool:
    return words.known(time) and across.low <= time <= across.high


def _times(across: Scale, height: float, named: bool = True) -> list[Markup]:
    """Return vertical grid lines at round times; `named`: with labels below."""
    parts = []
    for moment in moments(across):
        parts.append(rect("grid", (across(moment), across(moment) + 0.1), 0, height))
        if named:
            parts.append(text("tick", across(moment), height + 16, clock(moment)))
    return parts


def moments(across: Scale) -> list[float]:
    """Return the round times inside the scale, for at most about seven grid lines."""
    span = across.high - across.low
    if span < 120:
        return across.ticks()
    step = next((step for step in _TICK_STEPS if span / step <= 7), span / 7)
    return [step * number for number in range(math.ceil(across.low / step), math.floor(across.high / step) + 1)]


def clock(seconds: float) -> str:
    """Return a time of the run as text: `12 s`, `2:05`, `1:02:05`."""
    if seconds < 120:
        return f"{seconds:g} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


@dataclass(frozen=True)
class Strip:
    """A chart of one quantity over time, from 0 to `most`, with one or more series; the first is drawn filled."""

    title: str
    lines: tuple[Series, ...]
    most: float
    unit: Callable[[float], str]


def strips(evidence: Evidence) -> list[Strip]:
    """Return the strips on the use of the machine; series that are 0 throughout are left out."""
    use = evidence.use
    if use is None:
        return []

    def series(name: str, kind: str, values: Sequence[float] | Sequence[int]) -> Series:
        return Series(name, kind, thinned(list(zip(use.at, map(float, values), strict=False))))

    cores, memory = float(evidence.machine.cores), [series("all processes", "c-all", use.rss)]
    memory += [series("main process", "c-main", use.main_rss), series("/dev/shm", "c-workers", use.shm)]
    cpu = [series("all processes", "c-all", use.cpu), series("main process", "c-main", use.main)]
    cpu.append(series("loader workers", "c-workers", use.workers))
    drawn = [Strip("CPU", tuple(cpu), max(cores, _highest(cpu)), lambda value: f"{value:.3g} cores")]
    drawn += [
        strip
        for number, gpu in enumerate(use.gpus)
        for strip in _gpu_strips(gpu, f"GPU {number}" if len(use.gpus) > 1 else "GPU", series)
    ]
    disk = [series("disk read", "c-all", use.disk_read), series("disk written", "c-main", use.disk_write)]
    net = [series("network in", "c-all", use.net_in), series("network out", "c-main", use.net_out)]
    drawn.append(Strip("memory", tuple(memory), _highest(memory), _size))
    drawn += [Strip(name, tuple(lines), _highest(lines), _rate) for name, lines in (("disk", disk), ("network", net))]
    waiting = [series("waiting for disks", "c-all", use.waiting)]
    if _highest(waiting) >= 0.05:
        drawn.append(Strip("waiting for disks", tuple(waiting), 1.0, words.percent))
    nonzero = ((strip, tuple(line for line in strip.lines if _highest([line]) > 0)) for strip in drawn)
    return [Strip(strip.title, lines, strip.most, strip.unit) for strip, lines in nonzero if lines]


def _gpu_strips(gpu: GpuUse, name: str, series: Callable[[str, str, Sequence[float]], Series]) -> list[Strip]:
    memory, power = series("memory", "c-gpu", gpu.memory), series("power", "c-gpu", gpu.power)
    pcie = [series("to the GPU", "c-gpu", gpu.pcie_in), series("from it", "c-main", gpu.pcie_out)]
    return [
        Strip(f"{name} busy", (series("busy", "c-gpu", gpu.busy),), 1.0, words.percent),
        Strip(f"{name} memory", (memory,), max(float(gpu.memory_total), _highest([memory])), _size),
        Strip(f"{name} power", (power,), max(gpu.power_limit, _highest([power])), lambda watts: f"{watts:.0f} W"),
        Strip(f"{name} PCIe", tuple(pcie), _highest(pcie), _rate),
    ]


def _highest(lines: Iterable[Series]) -> float:
    return max((value for series in lines for _, value in series.points), default=0.0)


def _size(amount: float) -> str:
    return words.size(int(amount))


def _rate(amount: float) -> str:
    return f"{words.size(int(amount))}/s"


def strip_chart(strip: Strip, across: Scale, named: bool = False) -> Markup:
    """Draw a strip over the time of the run; `named`: with times below."""
    down = Scale(0.0, strip.most, near=98.0, far=2.0)
    drawn, means = [], []
    for number, series in enumerate(strip.lines):
        placed = [(across(at), down(min(value, strip.most))) for at, value in series.points if _inside(at, across)]
        if not placed:
            continue
        if number == 0:
            drawn.append(area(f"fill {series.kind}", [(placed[0][0], 98.0), *placed, (placed[-1][0], 98.0)]))
        drawn.append(line(f"stroke {series.kind}", placed, series.name))
        means.append(f"{series.name}: mean {strip.unit(statistics.fmean(value for _, value in series.points))}")
    if not drawn:
        return Markup()
    parts = [
        *_times(across, _STRIP_HEIGHT, named),
        rect("grid", (0, 100), 0, 1),
        rect("grid", (0, 100), _STRIP_HEIGHT, 1),
    ]
    parts += [stretched(_STRIP_HEIGHT, drawn), text("tick halo", 100, 14, strip.unit(strip.most))]
    return svg(strip.title, "; ".join(means), _STRIP_HEIGHT + (22 if named else 2), parts)
