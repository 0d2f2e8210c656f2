"""Readings of a quality in a run: which of its printed or logged numbers is meant, and when it had which value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from hasten.errors import HastenError
from hasten.target.goal import Goal
from hasten.target.lines import fits, meant, numbers_of

PRINTED, LOGGED = "printed", "logged"
_LINE = re.compile(rb"[\r\n]+")  # a progress bar ends its lines with a carriage return
_MOST_KEPT = 1 << 16  # bytes of a line that does not end
_SHOWN = 8  # names that a message lists


@dataclass(frozen=True)
class Reading:
    """A value, and when it was reported: seconds from the start of the process."""

    seconds: float
    value: float


@dataclass(frozen=True)
class Kind:
    """What tells one number of a script from its others.

    Attributes:
        where: "printed", or "logged" (TensorBoard, hasten's CSVLogger).
        label: What stands before it, as it is written.
        head: The first word of its line: `Test: ... Acc@1 70` is another number than `Epoch: ... Acc@1 70`.
        exact: Whether its label says what the goal's name says, and no more.
    """

    where: str
    label: str
    head: str
    exact: bool

    def __str__(self) -> str:
        within = f', in lines that begin with "{self.head}"' if self.head and self.head not in self.label else ""
        return f'{self.where}: "{self.label}"{within}'


@dataclass
class Readings:
    """The readings of one run, by kind.

    Args:
        goal: Whose name is looked for.
        only: A text that a printed line must hold to count; "": any line.
    """

    goal: Goal
    only: str = ""
    of: dict[Kind, list[Reading]] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)  # labels that do not fit, for a message
    examples: dict[Kind, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._wanted = meant(self.goal.name)

    def hear(self, where: str, line: str, seconds: float) -> None:
        """Take a line that came so many seconds after the start."""
        if self.only and where == PRINTED and self.only not in line:
            return
        head = next(iter(re.findall(r"[^\W\d_]{2,}", line)), "") if where == PRINTED else ""
        for number in numbers_of(line):
            if not fits(self._wanted, number.words):
                if len(self.others) < 1000:
                    self.others.add(number.label)
                continue
            kind = Kind(where, number.label, head, number.words == self._wanted)
            self.of.setdefault(kind, []).append(Reading(seconds, number.value))
            self.examples.setdefault(kind, line.strip()[:160])

    def of_kind(self, kind: Kind) -> list[Reading]:
        """Return the readings of a kind, in order of time."""
        return self.of.get(kind, [])

    def chosen(self) -> Kind:
        """Return the kind that the goal means.

        Raises:
            HastenError: There was none, or several that may be meant.
        """
        if not self.of:
            raise HastenError(f"the run reported no {self.goal.name!r}{self._said()}", self._fix())
        kinds = list(self.of)
        for prefer in (_is_printed(kinds), [kind for kind in kinds if kind.exact], _repeated(self.of)):
            left = [kind for kind in kinds if kind in prefer]
            kinds = left or kinds
        if len(kinds) > 1:
            lines = "".join(f"\n  {self.examples[kind]}" for kind in kinds[:_SHOWN])
            raise HastenError(
                f"{self.goal.name!r} may be one of {len(kinds)} numbers that the run reports:{lines}",
                "say which lines are meant: --target-line TEXT counts only lines that hold TEXT",
            )
        return kinds[0]

    def _said(self) -> str:
        names = sorted(self.others, key=lambda name: (len(name), name))[:_SHOWN]
        return f"; it reported {', '.join(map(repr, names))}" if names else ", nor any other number with a name"

    def _fix(self) -> str:
        return (
            "name it as the script prints it, or have it print a line such as `val_loss 1.93` at each validation; "
            "what goes to TensorBoard is seen too"
        )


def _is_printed(kinds: list[Kind]) -> list[Kind]:
    """What is printed goes before what is logged as well."""
    return [kind for kind in kinds if kind.where == PRINTED]


def _repeated(of: Mapping[Kind, list[Reading]]) -> list[Kind]:
    """What comes again and again goes before a line that sums up at the end."""
    return [kind for kind, readings in of.items() if len(readings) > 1]


class Tail:
    """Reads what a process appends to a file, line by line, as it comes.

    Args:
        path: The file; it may come later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def lines(self, last: bool = False) -> list[str]:
        """Return the lines that came since the last call; the `last` time also one that does not end."""
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return []
        parts = _LINE.split(self._rest + self._file.read())
        self._rest = parts.pop()[-_MOST_KEPT:]
        if last:
            parts.append(self._rest)
            self._rest = b""
        return [text for part in parts if (text := part.decode("utf-8", "replace").strip())]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
