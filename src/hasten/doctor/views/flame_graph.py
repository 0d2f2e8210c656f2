"""Draw folded stacks ("outer;inner 12" per line) as an SVG flame graph without scripts, the outermost call on top."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from markupsafe import Markup

from hasten.report import words
from hasten.report.drawing import rect, svg

_ROW = 19  # height of a row in pixels
_LETTER_WIDTH = 0.78  # width of a letter, in percent of the page's width
_NARROWEST = 0.25  # percent of the page's width; narrower calls are left out
_DEEPEST = 60  # rows; deeper calls are left out
_COLOURS = 6  # colours in flame.css.j2


@dataclass
class Frame:
    """A call and the calls it made, whose samples are included in `samples`."""

    name: str
    samples: int = 0
    calls: dict[str, Frame] = field(default_factory=dict)


def tree(folded: str) -> Frame:
    """Return the stacks as one tree, without the outer calls that all stacks share.

    >>> tree("main;load;read 3\\nmain;load;decode 5").name
    'load'
    """
    root = Frame("all")
    for line in folded.splitlines():
        stack, _, count = line.rpartition(" ")
        if not stack or not count.isdecimal():
            continue
        node = root
        node.samples += int(count)
        for name in stack.split(";"):
            node = node.calls.setdefault(name, Frame(name))
            node.samples += int(count)
    while len(root.calls) == 1 and (only := next(iter(root.calls.values()))).samples == root.samples and only.calls:
        root = only
    return root


def draw(folded: str) -> Markup:
    """Draw the stacks; empty if there are none. A tooltip names each call and its share."""
    root = tree(folded)
    if not root.samples:
        return Markup()
    parts: list[Markup] = []
    depth = _draw_call(root, 0.0, 100.0 / root.samples, 0, root.samples, parts)
    description = f"{words.count(root.samples, 'sample')} below {words.clean(root.name)}"
    return svg("Flame graph", description, (depth + 1) * _ROW, parts)


def _draw_call(frame: Frame, start: float, scale: float, depth: int, total: int, parts: list[Markup]) -> int:
    """Append the drawing of a call and of the calls it made to `parts`, and return the deepest row used.

    Args:
        frame: The call.
        start: Where it begins, in percent of the width.
        scale: Percent of the width per sample.
        depth: Its row.
        total: Samples of all stacks, for the call's share.
        parts: Shapes drawn so far.
    """
    width = frame.samples * scale
    name = words.clean(frame.name)
    description = f"{name}: {words.percent(frame.samples / total)}, {words.count(frame.samples, 'sample')}"
    parts.append(rect(f"fl-{_colour(frame.name)}", (start, start + width), depth * _ROW, _ROW - 1, description))
    letters = int((width - 1.0) / _LETTER_WIDTH)
    if letters >= 4:
        shown = name if len(name) <= letters else f"{name[: letters - 1]}…"
        parts.append(_label(start, depth, shown))
    deepest = depth
    if depth < _DEEPEST:
        for call in sorted(frame.calls.values(), key=lambda call: call.name):
            if call.samples * scale >= _NARROWEST:
                deepest = max(deepest, _draw_call(call, start, scale, depth + 1, total, parts))
            start += call.samples * scale
    return deepest


def _label(start: float, depth: int, shown: str) -> Markup:
    return Markup('<text class="flame" x="{:.3f}%" y="{:.1f}">{}</text>').format(
        start + 0.4, depth * _ROW + 13.5, shown
    )


def _colour(name: str) -> int:
    """Return the number of a call's colour; all calls of a package have the same.

    A name is "function (package/file.py:12)", so the text before the first "/" is the package, or the
    file of a script.
    """
    location = name.rpartition(" (")[2]
    return zlib.crc32(location.partition("/")[0].partition(":")[0].encode()) % _COLOURS
