"""Inline SVG drawings of a proof, by plain functions; empty where there is nothing to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from markupsafe import Markup

from hasten.evidence import PHASES
from hasten.report import words
from hasten.report.drawing import Point, Scale, area, columns, dot, line, rect, rows, stretched, svg, text
from hasten.report.verdict import phases
from hasten.tuner.proof import Curves, Pair, ParityCheck, Proof

Losses = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Bar:
    """A bar from `start` to `end`, in the data's own unit. `kind` is its class in the style sheet."""

    label: str
    start: float
    end: float
    kind: str
    note: str = ""


def phase_bars(proof: Proof) -> dict[str, list[Bar]]:
    """Per side the stacked bars of a steady step, in seconds: each begins where the one before ends."""
    sides: dict[str, list[Bar]] = {"baseline": [], "plan": []}
    for row in phases(proof):
        kind = phase_class(row.name)
        for side, seconds in (("baseline", row.before), ("plan", row.after)):
            start = sides[side][-1].end if sides[side] else 0.0
            sides[side].append(Bar(row.label, start, start + seconds, kind))
    return {side: bars for side, bars in sides.items() if bars and bars[-1].end > 0}


def phase_class(name: str) -> str:
    """The style class of a phase, which gives its colour."""
    return f"ph-{name}" if name in PHASES else "ph-extra"


def waterfall_bars(proof: Proof) -> list[Bar]:
    """From 1x to the total: one bar a technique, the strongest first, then what they do together.

    Bars multiply: each runs from the product so far to that product times its contribution. Leave-one-out
    contributions do not multiply to the total, so the last bar, "interplay", closes the gap.
    """
    kept = [one for one in proof.techniques if words.known(one.contribution) and one.contribution > 0]
    total = proof.speedup.ratio
    if not kept or not words.known(total) or total <= 0:
        return []
    bars, reached = [], 1.0
    for one in sorted(kept, key=lambda one: -one.contribution):
        end = reached * one.contribution
        kind = "gain" if end >= reached else "loss"
        bars.append(Bar(words.clean(one.name), reached, end, kind, words.times(one.contribution)))
        reached = end
    return [*bars, Bar("interplay", reached, total, "interplay", words.times(total / reached))]


def phase_chart(proof: Proof) -> Markup:
    """Stacked bars of a steady step before and after, on one scale."""
    sides = phase_bars(proof)
    if not sides:
        return Markup()
    longest = max(bars[-1].end for bars in sides.values())
    scale = Scale(0.0, longest)
    parts = []
    for row, (side, bars) in enumerate(sides.items()):
        top = row * 66
        parts += [
            text("label", 0, top + 15, side),
            text("value", 100, top + 15, words.alike(bars[-1].end, longest)),
        ]
        for bar in bars:
            told = f"{side}, {bar.label}: {words.alike(bar.end - bar.start, longest)}"
            parts.append(rect(bar.kind, (scale(bar.start), scale(bar.end)), top + 23, 30, told))
    told = ", ".join(f"{side} {words.alike(bars[-1].end, longest)} a step" for side, bars in sides.items())
    return svg("Where a step's time goes", told, 66 * len(sides) - 10, parts)


def waterfall_chart(proof: Proof) -> Markup:
    """What each technique brings, from 1x to the total; logarithmic: equal lengths are equal factors."""
    bars = waterfall_bars(proof)
    if not bars:
        return Markup()
    total = proof.speedup.ratio
    bars.append(Bar("the plan", 1.0, total, "plan", words.times(total)))
    ends = [value for bar in bars for value in (bar.start, bar.end)]
    scale = Scale(min(ends), max(1.01, *ends), log=True)
    height = 40 * len(bars)
    parts = columns(scale, height, lambda ratio: f"{ratio:g}x")
    for row, bar in enumerate(bars):
        top = row * 40
        parts += [text("label halo", 0, top + 15, bar.label), text("value halo", 100, top + 15, bar.note)]
        parts.append(rect(bar.kind, (scale(bar.start), scale(bar.end)), top + 21, 14, f"{bar.label}: {bar.note}"))
    told = ", ".join(f"{bar.label} {bar.note}" for bar in bars)
    return svg("Contribution of each technique", told, height + 22, parts)


def curve_chart(curves: Curves) -> Markup:
    """Training loss by step: the baseline's seeds as a band with their mean, the plan's seeds as lines."""
    baseline = [_known(curves.steps, losses) for losses in curves.baseline]
    plan = [_known(curves.steps, losses) for losses in curves.plan]
    values = [loss for losses in [*baseline, *plan] for _, loss in losses]
    if len(curves.steps) < 2 or not values:
        return Markup()
    log = min(values) > 0 and max(values) / min(values) > 30
    down = Scale(min(values), max(values), log=log, near=96, far=6)
    across = Scale(min(curves.steps), max(curves.steps))

    def place(losses: Losses) -> list[Point]:
        return [(across(step), down(loss)) for step, loss in losses]

    low, mean, high = _band(baseline)
    drawn = [
        area("band", place([*high, *reversed(low)])),
        line("line-baseline", place(mean), "baseline, mean"),
    ]
    drawn += [line("line-plan", place(losses), f"plan, seed {n}") for n, losses in enumerate(plan, 1)]
    height = 260.0
    parts = rows(down, height, lambda loss: f"{loss:g}")
    parts.insert(0, stretched(height, drawn))
    parts += columns(across, height, lambda step: f"{step:,.0f}")
    told = f"{words.count(len(plan), 'plan seed')} over {words.count(len(baseline), 'baseline seed')}"
    return svg("Training loss by step" + (", logarithmic" if log else ""), told, height + 22, parts)


def pair_chart(pairs: Sequence[Pair]) -> Markup:
    """Seconds per steady step of each pair of trials: a dot a side, joined; from 0."""
    longest = max((max(pair.baseline, pair.plan) for pair in pairs), default=0.0)
    if not longest > 0:
        return Markup()
    scale = Scale(0.0, longest * 1.03)
    height = 36 * len(pairs)
    parts = columns(scale, height, words.duration)
    for row, pair in enumerate(pairs):
        y = row * 36 + 26
        told = f"seed {pair.seed}: {words.duration(pair.baseline)} -> {words.duration(pair.plan)}"
        ratio = words.times(pair.baseline / pair.plan) if pair.plan > 0 else words.NONE
        parts.append(text("label halo", 0, y - 11, f"pair {row + 1}, seed {pair.seed}"))
        parts.append(text("value halo", 100, y - 11, ratio))
        parts.append(rect("join", (scale(pair.baseline), scale(pair.plan)), y - 1, 2, told))
        parts += [
            dot("dot-baseline", scale(pair.baseline), y, told),
            dot("dot-plan", scale(pair.plan), y, told),
        ]
    return svg("Seconds per steady step, pair by pair", words.count(len(pairs), "pair"), height + 22, parts)


def parity_chart(check: ParityCheck) -> Markup:
    """One compared quantity: the band for the plan's mean, the seeds as dots, the mean as a bar."""
    values = [*check.baseline, *check.plan, check.band_low, check.band_high, check.plan_mean]
    if not all(words.known(value) for value in values):
        return Markup()
    room = (max(values) - min(values)) * 0.06 or abs(max(values)) * 0.01 or 1.0
    scale = Scale(min(values) - room, max(values) + room)
    told = f"band {words.number(check.band_low)} to {words.number(check.band_high)}"
    mean = f"mean of the plan {words.number(check.plan_mean)}"
    parts = [rect("band", (scale(check.band_low), scale(check.band_high)), 0, 60, told)]
    parts += columns(scale, 60, lambda value: f"{value:g}")
    for y, name, side in ((17, "baseline", check.baseline), (43, "plan", check.plan)):
        parts += [dot(f"dot-{name}", scale(value), y, f"{name}: {words.number(value)}") for value in side]
    parts.append(rect("mean", (scale(check.plan_mean) - 0.2, scale(check.plan_mean) + 0.2), 30, 26, mean))
    return svg(f"Parity: {words.clean(check.what)}", f"{told}, {mean}", 82, parts)


def _known(steps: Sequence[int], losses: Sequence[float]) -> Losses:
    """The points of one seed that can be drawn."""
    return [(step, loss) for step, loss in zip(steps, losses, strict=False) if words.known(loss)]


def _band(seeds: Sequence[Losses]) -> tuple[Losses, Losses, Losses]:
    """Lowest, mean and highest loss over the seeds that have a step."""
    by_step: dict[int, list[float]] = {}
    for step, loss in sorted(chain.from_iterable(seeds)):
        by_step.setdefault(step, []).append(loss)
    low = [(step, min(losses)) for step, losses in by_step.items()]
    mean = [(step, sum(losses) / len(losses)) for step, losses in by_step.items()]
    high = [(step, max(losses)) for step, losses in by_step.items()]
    return low, mean, high
