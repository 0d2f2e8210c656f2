"""Draw charts: a scale, and a few SVG shapes placed in percent of the width.

Positions are percentages, so a chart stretches with the page while text keeps its size. Colours come from the page's
style sheet, by class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hasten.evidence import PHASES

Point = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` to `high` onto percent from `near` to `far`, linearly or logarithmically."""

    low: float
    high: float
    log: bool = False
    near: float = 0.0
    far: float = 100.0

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.near + share * (self.far - self.near)

    def ticks(self) -> list[float]:
        """Return about three to seven round values inside the scale; only `low` if it has no extent."""
        if not self.high > self.low:
            return [self.low]
        return _log_ticks(self.low, self.high) if self.log else _even_ticks(self.low, self.high)


def _even_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 4
    if rough <= 0:  # the range is so small that a quarter of it rounds to 0
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        ticks = [float(f"{step * 10.0**decade:.12g}") for decade in decades for step in steps]
        ticks = [value for value in ticks if low <= value <= high]
        if len(ticks) >= 3:
            return ticks[:: math.ceil(len(ticks) / 7)]
    return _even_ticks(low, high)


def phase_class(name: str) -> str:
    """Return the CSS class of a phase, which sets its colour."""
    return f"ph-{name}" if name in PHASES else "ph-extra"


def svg(title: str, description: str, height: float, parts: Iterable[Markup]) -> Markup:
    """Return one drawing as wide as its container, with a title and a description for screen readers."""
    return Markup(
        '<svg class="chart" role="img" width="100%" height="{:.0f}"><title>{}</title><desc>{}</desc>{}</svg>'
    ).format(height, title, description, Markup("\n").join(parts))


def rect(kind: str, ends: Point, y: float, height: float, description: str = "") -> Markup:
    """Return a horizontal bar between two ends, given in percent of the width, in either order."""
    start, end = sorted(ends)
    return Markup('<rect class="{}" x="{:.3f}%" y="{:.1f}" width="{:.3f}%" height="{}">{}</rect>').format(
        kind, start, y, end - start, height, _title(description)
    )


def dot(kind: str, x: float, y: float, description: str) -> Markup:
    """Return a dot. `x` is in percent of the width."""
    return Markup('<circle class="{}" cx="{:.3f}%" cy="{:.1f}" r="5.5">{}</circle>').format(
        kind, x, y, _title(description)
    )


def text(kind: str, x: float, y: float, words: str, anchor: str = "") -> Markup:
    """Return a text label. Without an `anchor`, a label near an edge is aligned to stay inside the drawing."""
    anchor = anchor or ("start" if x < 4 else "end" if x > 96 else "middle")
    return Markup('<text class="{}" x="{:.3f}%" y="{:.1f}" text-anchor="{}">{}</text>').format(
        kind, x, y, anchor, words
    )


def line(kind: str, points: Sequence[Point], description: str = "") -> Markup:
    """Return a line through points in percent of width and height, to be passed to `stretched`."""
    return Markup('<polyline class="{}" points="{}">{}</polyline>').format(kind, _path(points), _title(description))


def area(kind: str, points: Sequence[Point]) -> Markup:
    """Return the filled area inside points in percent of width and height, to be passed to `stretched`."""
    return Markup('<polygon class="{}" points="{}"></polygon>').format(kind, _path(points))


def stretched(height: float, parts: Iterable[Markup]) -> Markup:
    """Return lines and areas stretched over the whole width."""
    return Markup(
        '<svg x="0" y="0" width="100%" height="{}" viewBox="0 0 100 100" preserveAspectRatio="none">{}</svg>'
    ).format(height, Markup("\n").join(parts))


def columns(scale: Scale, height: float, name: Callable[[float], str]) -> list[Markup]:
    """Return vertical grid lines with their values beneath."""
    parts = []
    for tick in scale.ticks():
        parts.append(Markup('<rect class="grid" x="{:.3f}%" y="0" width="1" height="{}"/>').format(scale(tick), height))
        parts.append(text("tick", scale(tick), height + 16, name(tick)))
    return parts


def rows(scale: Scale, height: float, name: Callable[[float], str]) -> list[Markup]:
    """Return horizontal grid lines with their values above them, at the left. `scale` counts from the top."""
    parts = []
    for tick in scale.ticks():
        y = scale(tick) * height / 100
        parts.append(rect("grid", (0, 100), y, 1))
        parts.append(text("tick halo", 0, y - 4, name(tick)))
    return parts


def _path(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.2f},{y:.2f}" for x, y in points)


def _title(description: str) -> Markup:
    return Markup("<title>{}</title>").format(description) if description else Markup()
