"""Draws folded stacks ("outer;inner 12" a line) as a flame graph, the outermost call on top; no script in it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from markupsafe import Markup

from hasten.report import words
from hasten.report.drawing import rect, svg

_ROW = 19
_LETTER = 0.78  # percent of the page's width that a letter takes
_THIN = 0.25  # percent; what is thinner is left out
_DEEPEST = 60
_COLOURS = 6


@dataclass
class Frame:
    """A call, and those it made. `samples` includes theirs."""

    name: str
    samples: int = 0
    calls: dict[str, Frame] = field(default_factory=dict)


def tree(folded: str) -> Frame:
    """The stacks as one tree, without what all of them have in common above their first parting."""
    root = Frame("all")
    for line in folded.splitlines():
        stack, _, count = line.rpartition(" ")
        if not stack or not count.isdecimal():
            continue
        at = root
        at.samples += int(count)
        for name in stack.split(";"):
            at = at.calls.setdefault(name, Frame(name))
            at.samples += int(count)
    while len(root.calls) == 1 and (only := next(iter(root.calls.values()))).samples == root.samples and only.calls:
        root = only
    return root


def draw(folded: str) -> Markup:
    """The drawing; empty where there are no stacks. What each call is, and its share, shows at the pointer."""
    root = tree(folded)
    if not root.samples:
        return Markup()
    parts: list[Markup] = []
    depth = _place(root, 0.0, 100.0 / root.samples, 0, root.samples, parts)
    description = f"{words.count(root.samples, 'sample')} below {words.clean(root.name)}"
    return svg("Flame graph", description, (depth + 1) * _ROW, parts)


def _place(frame: Frame, start: float, scale: float, depth: int, whole: int, parts: list[Markup]) -> int:
    """Draw a call from `start` percent on, and what it called below it; how deep that went."""
    width = frame.samples * scale
    name = words.clean(frame.name)
    description = f"{name}: {words.percent(frame.samples / whole)}, {words.count(frame.samples, 'sample')}"
    parts.append(rect(f"fl-{_colour(frame.name)}", (start, start + width), depth * _ROW, _ROW - 1, description))
    room = int((width - 1.0) / _LETTER)
    if room >= 4:
        shown = name if len(name) <= room else f"{name[: room - 1]}…"
        parts.append(_label(start, depth, shown))
    deepest = depth
    if depth < _DEEPEST:
        for call in sorted(frame.calls.values(), key=lambda one: one.name):
            if call.samples * scale >= _THIN:
                deepest = max(deepest, _place(call, start, scale, depth + 1, whole, parts))
            start += call.samples * scale
    return deepest


def _label(start: float, depth: int, shown: str) -> Markup:
    return Markup('<text class="flame" x="{:.3f}%" y="{:.1f}">{}</text>').format(
        start + 0.4, depth * _ROW + 13.5, shown
    )


def _colour(name: str) -> int:
    """One of a few colours: calls of a package have the same."""
    place = name.rpartition(" (")[2]
    return zlib.crc32(place.partition("/")[0].partition(":")[0].encode()) % _COLOURS
