"""Prints terminal views: text that cannot steer the terminal, columns, bars."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from hasten.report import words

_PLAIN = {words.NONE: "-", "µ": "u", "±": "+-", "→": "->", "“": '"', "”": '"', "’": "'", "×": "x"}


class Screen:
    """A console, and how text reaches it. Its width, colours and letters are respected."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @property
    def ascii_only(self) -> bool:
        """The console has no other letters."""
        return self.console.options.ascii_only

    def text(self, text: str, style: str = "") -> Text:
        """Text as it is, never as rich's markup, and only letters that this terminal has."""
        if self.ascii_only:
            for letter, plain in _PLAIN.items():
                text = text.replace(letter, plain)
            text = text.encode("ascii", "replace").decode()
        return Text(text, style)

    def say(self, text: Text, indent: int = 2, first: Text | None = None) -> None:
        """Print wrapped text whose lines are all indented; `first` stands in the first one's indent.

        A word that is longer than a line stays whole: it is a path or a setting, which somebody may copy.
        """
        room = max(8, self.console.width - indent)
        for line in _wrapped(text, room):
            line.rstrip()
            margin = first if first is not None else Text()
            self.console.print(margin + Text(" " * (indent - margin.cell_len)) + line, soft_wrap=True)
            first = None

    def heading(self, text: str, rest: str = "") -> None:
        """An empty line, then a heading; `rest` follows it in an ordinary face."""
        self.console.print()
        self.say(self.text(text, "bold") + self.text(f"  {rest}" if rest else "", "dim"), 0)

    def labelled(self, label: str, text: str, room: int, style: str = "dim", text_style: str = "") -> None:
        """A paragraph with a word of its own before it, in a column `room` letters wide."""
        self.say(self.text(text, text_style), 2 + room, self.text(f"  {label}", style))

    def bar(self, length: int, style: str, seen: bool = True) -> Text:
        """A text bar of so many letters; one too short for a letter is a thin one if it is to be `seen`."""
        mark, thin = ("#", ".") if self.ascii_only else ("█", "▏")
        return Text(mark * length if length else thin if seen else "", style)


def _wrapped(text: Text, room: int) -> Iterator[Text]:
    """Lines of at most `room` cells, but for a single word that has more (rich would break it, or cut it off)."""
    for paragraph in text.split(allow_blank=True):
        breaks, used = [], 0
        for word in re.finditer(r"\S+\s*|\s+", paragraph.plain):
            if used and used + cell_len(word[0].rstrip()) > room:
                breaks.append(word.start())
                used = 0
            used += cell_len(word[0])
        yield from paragraph.divide(breaks)


def stacked(amounts: Sequence[float], room: int) -> list[int]:
    """Whole lengths in proportion to `amounts` that add up to `room`: each ends where the sum so far does.

    >>> stacked([1.0, 1.0, 1.0], 10)
    [3, 4, 3]
    """
    whole = sum(amounts)
    if not whole > 0:
        return [0] * len(amounts)
    ends, reached = [], 0.0
    for amount in amounts:
        reached += amount
        ends.append(min(room, round(reached / whole * room)))
    if ends:
        ends[-1] = room
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
