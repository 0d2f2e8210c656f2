"""Draw the charts of a tune's report as inline SVG: phases, effects, losses, pairs, parity.

Each `*_chart` function returns empty markup if the proof holds nothing to draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from markupsafe import Markup

from hasten.report import words
from hasten.report.drawing import Point, Scale, area, columns, dot, line, phase_class, rect, rows, stretched, svg, text
from hasten.report.technique_words import Row
from hasten.report.verdict import phases
from hasten.tuner.proof import Curves, Pair, ParityCheck, Proof

Losses = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Bar:
    """A bar from `start` to `end`, in the data's unit. `kind` is its CSS class."""

    label: str
    start: float
    end: float
    kind: str
    note: str = ""


def phase_bars(proof: Proof) -> dict[str, list[Bar]]:
    """Return the stacked phase bars (seconds) of a step for each side, "baseline" and "plan".

    Each bar starts at the previous bar's end. A side without phases is left out.
    """
    sides: dict[str, list[Bar]] = {"baseline": [], "plan": []}
    for row in phases(proof):
        kind = phase_class(row.name)
        for side, seconds in (("baseline", row.before), ("plan", row.after)):
            start = sides[side][-1].end if sides[side] else 0.0
            sides[side].append(Bar(row.label, start, start + seconds, kind))
    return {side: bars for side, bars in sides.items() if bars and bars[-1].end > 0}


def phase_chart(proof: Proof) -> Markup:
    """Draw a step's phases before and after as stacked bars on one scale."""
    sides = phase_bars(proof)
    if not sides:
        return Markup()
    longest = max(bars[-1].end for bars in sides.values())
    scale = Scale(0.0, longest)
    shapes = []
    for row, (side, bars) in enumerate(sides.items()):
        top = row * 66
        shapes += [text("label", 0, top + 15, side), text("value", 100, top + 15, words.alike(bars[-1].end, longest))]
        for bar in bars:
            description = f"{side}, {bar.label}: {words.alike(bar.end - bar.start, longest)}"
            shapes.append(rect(bar.kind, (scale(bar.start), scale(bar.end)), top + 23, 30, description))
    description = ", ".join(f"{side} {words.alike(bars[-1].end, longest)} a step" for side, bars in sides.items())
    return svg("Where a step's time goes", description, 66 * len(sides) - 10, shapes)


def effect_chart(rows_shown: Sequence[Row]) -> Markup:
    """Draw how many times faster a step is with each technique than without: a dot, and its interval as a bar.

    The scale is logarithmic: equal lengths are equal factors. The vertical line marks 1x; a technique whose interval
    crosses it may be no gain at all.
    """
    measured = [
        row for row in rows_shown if all(words.known(end) and (end or 0) > 0 for end in (row.ratio, row.low, row.high))
    ]
    if not measured:
        return Markup()
    ends = [end for row in measured for end in (row.low, row.high, row.ratio) if end]
    scale = Scale(min(0.95, *ends), max(1.05, *ends), log=True, near=1, far=99)
    height = 40 * len(measured)
    shapes = columns(scale, height, lambda ratio: f"{ratio:g}x")
    shapes.append(rect("as-it-was", (scale(1.0), scale(1.0) + 0.2), 0, height))
    descriptions = []
    for number, row in enumerate(measured):
        top = number * 40
        label = row.name if row.kept else f"{row.name} = {row.setting}, not kept"
        effect = f"{row.brings}, helps: {row.certainty}"
        descriptions.append(f"{label} {row.brings} ({row.interval}), helps: {row.certainty}")
        shapes += [text("label halo", 0, top + 15, label), text("value halo", 100, top + 15, effect)]
        side = "plan" if row.kept else "baseline"
        shapes.append(rect(f"span-{side}", (scale(row.low or 1), scale(row.high or 1)), top + 26, 4, descriptions[-1]))
        shapes.append(dot(f"dot-{side}", scale(row.ratio or 1), top + 28, descriptions[-1]))
    return svg("What each technique brings", "; ".join(descriptions), height + 22, shapes)


def curve_chart(curves: Curves) -> Markup:
    """Draw the training loss by step: the baseline's seeds as a band with their mean, the plan's seeds as lines."""
    baseline = [_finite_points(curves.steps, losses) for losses in curves.baseline]
    plan = [_finite_points(curves.steps, losses) for losses in curves.plan]
    values = [loss for losses in [*baseline, *plan] for _, loss in losses]
    if len(curves.steps) < 2 or not values:
        return Markup()
    log = min(values) > 0 and max(values) / min(values) > 30
    y_scale = Scale(min(values), max(values), log=log, near=96, far=6)
    x_scale = Scale(min(curves.steps), max(curves.steps))

    def points(losses: Losses) -> list[Point]:
        return [(x_scale(step), y_scale(loss)) for step, loss in losses]

    low, mean, high = _band(baseline)
    lines = [area("band", points([*high, *reversed(low)])), line("line-baseline", points(mean), "baseline, mean")]
    lines += [line("line-plan", points(losses), f"plan, seed {n}") for n, losses in enumerate(plan, 1)]
    height = 260.0
    shapes = rows(y_scale, height, lambda loss: f"{loss:g}")
    shapes.insert(0, stretched(height, lines))
    shapes += columns(x_scale, height, lambda step: f"{step:,.0f}")
    description = f"{words.count(len(plan), 'plan seed')} over {words.count(len(baseline), 'baseline seed')}"
    return svg("Training loss by step" + (", logarithmic" if log else ""), description, height + 22, shapes)


def pair_chart(pairs: Sequence[Pair]) -> Markup:
    """Draw the seconds per step of each pair of processes: one dot per side, joined, on a scale from 0."""
    longest = max((max(pair.baseline, pair.plan) for pair in pairs), default=0.0)
    if not longest > 0:
        return Markup()
    scale = Scale(0.0, longest * 1.03)
    height = 36 * len(pairs)
    shapes = columns(scale, height, words.duration)
    for row, pair in enumerate(pairs):
        y = row * 36 + 26
        description = f"seed {pair.seed}: {words.duration(pair.baseline)} -> {words.duration(pair.plan)}"
        ratio = words.times(pair.baseline / pair.plan) if pair.plan > 0 else words.NONE
        shapes.append(text("label halo", 0, y - 11, f"pair {row + 1}, seed {pair.seed}"))
        shapes.append(text("value halo", 100, y - 11, ratio))
        shapes.append(rect("join", (scale(pair.baseline), scale(pair.plan)), y - 1, 2, description))
        shapes += [
            dot("dot-baseline", scale(pair.baseline), y, description),
            dot("dot-plan", scale(pair.plan), y, description),
        ]
    return svg("Seconds per step, pair by pair", words.count(len(pairs), "pair"), height + 22, shapes)


def parity_chart(check: ParityCheck) -> Markup:
    """Draw one parity check: the relative change under the plan, a dot per pair, and the mean with its interval.

    The shaded band covers mean changes too small for the check to detect.
    """
    pairs = [y / x - 1 for x, y in zip(check.baseline, check.plan, strict=False) if x and words.known(y / x)]
    ends = [check.change, check.low, check.high, *pairs]
    if not pairs or not all(words.known(value) for value in ends):
        return Markup()
    unseen = check.detectable if words.known(check.detectable) else 0.0
    furthest = max(map(abs, [*ends, unseen])) * 1.06 or 0.01
    scale = Scale(-furthest, furthest)
    mean = f"mean {words.signed(check.change)}, from {words.signed(check.low)} to {words.signed(check.high)}"
    shapes = [
        rect("band", (scale(-unseen), scale(unseen)), 0, 60, f"a mean change below {words.percent(unseen)} goes unseen")
    ]
    shapes += columns(scale, 60, words.signed)
    shapes.append(rect("as-it-was", (scale(0.0) - 0.1, scale(0.0) + 0.1), 0, 60, "no change"))
    shapes += [
        dot("dot-baseline", scale(share), 17, f"pair {n}: {words.signed(share)}") for n, share in enumerate(pairs, 1)
    ]
    shapes.append(rect("span-plan", (scale(check.low), scale(check.high)), 41, 4, mean))
    shapes.append(dot("dot-plan", scale(check.change), 43, mean))
    return svg(f"Parity: {words.clean(check.what)}", f"{words.count(len(pairs), 'pair')}, {mean}", 82, shapes)


def _finite_points(steps: Sequence[int], losses: Sequence[float]) -> Losses:
    """Return one seed's (step, loss) points, without losses that are NaN or infinite."""
    return [(step, loss) for step, loss in zip(steps, losses, strict=False) if words.known(loss)]


def _band(seeds: Sequence[Losses]) -> tuple[Losses, Losses, Losses]:
    """Return the lowest, mean and highest loss at each step, over the seeds that have a point there."""
    by_step: dict[int, list[float]] = {}
    for step, loss in sorted(chain.from_iterable(seeds)):
        by_step.setdefault(step, []).append(loss)
    low = [(step, min(losses)) for step, losses in by_step.items()]
    mean = [(step, sum(losses) / len(losses)) for step, losses in by_step.items()]
    high = [(step, max(losses)) for step, losses in by_step.items()]
    return low, mean, high
