"""Print terminal views: text free of rich's markup, wrapped and labelled paragraphs, bars."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from hasten.report import words

_PLAIN = {words.NONE: "-", "µ": "u", "±": "+-", "→": "->", "“": '"', "”": '"', "’": "'", "×": "x"}


class Screen:
    """Prints to a console, within its width, colours and character set."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @property
    def ascii_only(self) -> bool:
        """Whether the console can show ASCII only."""
        return self.console.options.ascii_only

    def text(self, text: str, style: str = "") -> Text:
        """Return literal text, never parsed as rich's markup, in characters this terminal has."""
        if self.ascii_only:
            for letter, plain in _PLAIN.items():
                text = text.replace(letter, plain)
            text = text.encode("ascii", "replace").decode()
        return Text(text, style)

    def say(self, text: Text, indent: int = 2, label: Text | None = None) -> None:
        """Print wrapped text with every line indented; `label` is printed inside the first line's indent.

        A word longer than a line is not broken: it is a path or a setting, which somebody may copy.
        """
        width = max(8, self.console.width - indent)
        for line in _wrap(text, width):
            line.rstrip()  # in place: rich's Text is mutable
            margin = label if label is not None else Text()
            self.console.print(margin + Text(" " * (indent - margin.cell_len)) + line, soft_wrap=True)
            label = None

    def heading(self, text: str, note: str = "") -> None:
        """Print an empty line, then a bold heading; `note` follows it in dim text."""
        self.console.print()
        self.say(self.text(text, "bold") + self.text(f"  {note}" if note else "", "dim"), 0)

    def labelled(self, label: str, text: str, label_width: int, style: str = "dim", text_style: str = "") -> None:
        """Print a paragraph after a label, in a column `label_width` characters wide."""
        self.say(self.text(text, text_style), 2 + label_width, self.text(f"  {label}", style))

    def bar(self, length: int, style: str, visible: bool = True) -> Text:
        """Return a bar `length` characters long; at length 0, a thin one if it must still be `visible`."""
        mark, thin = ("#", ".") if self.ascii_only else ("█", "▏")
        return Text(mark * length if length else thin if visible else "", style)


def _wrap(text: Text, width: int) -> Iterator[Text]:
    """Yield lines of at most `width` cells; a longer single word stays whole (rich would break it or cut it off)."""
    for paragraph in text.split(allow_blank=True):
        breaks, filled = [], 0
        for word in re.finditer(r"\S+\s*|\s+", paragraph.plain):
            if filled and filled + cell_len(word[0].rstrip()) > width:
                breaks.append(word.start())
                filled = 0
            filled += cell_len(word[0])
        yield from paragraph.divide(breaks)


def stacked(amounts: Sequence[float], width: int) -> list[int]:
    """Return integer lengths in proportion to `amounts` that add up to `width`.

    Each bar's end is the rounded running sum, so rounding errors do not accumulate.
    >>> stacked([1.0, 1.0, 1.0], 10)
    [3, 4, 3]
    """
    total = sum(amounts)
    if not total > 0:
        return [0] * len(amounts)
    ends, reached = [], 0.0
    for amount in amounts:
        reached += amount
        ends.append(min(width, round(reached / total * width)))
    if ends:
        ends[-1] = width
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
