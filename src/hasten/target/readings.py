"""Readings of a quality in a run: which of its printed or logged numbers is meant, and when it had which value."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from hasten.errors import HastenError
from hasten.target.goal import Goal

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
    """Identifies one number of a script among its others.

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
        for prefer in (
            [kind for kind in kinds if kind.where == PRINTED],
            [kind for kind in kinds if kind.exact],
            [kind for kind, readings in self.of.items() if len(readings) > 1],
        ):
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


_NUMBER = re.compile(
    r"(?<![\w.@])[-+]?(?:\d[\d_]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)(?![\w@]|\.\d)", re.IGNORECASE
)
_OUT_OF = re.compile(r"\s*/\s*(\d+)(?![\w.])")
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BREAKS = re.compile(r"[,;|\t{}\[\]()]|\s-\s|\s{3,}")  # nothing before it belongs to the name of what comes behind
_HEADER = re.compile(r"^\W*(?P<words>[\w ]{2,40}?)\s*:\s*\S")  # `val: loss 0.4 acc 0.8`: of both
_WORDS = re.compile(r"@?[^\W_]+(?:@\d+)?")

_SAME = {
    "validation": "val", "valid": "val", "eval": "val", "evaluation": "val", "dev": "val",
    "testing": "test", "training": "train", "accuracy": "acc", "perplexity": "ppl", "top1": "acc@1", "top5": "acc@5",
}  # fmt: skip
_EMPTY = {"average", "avg", "mean", "set", "total", "epoch", "on", "the", "of", "is", "results", "result", "metrics"}
_SPLITS = {"val", "test", "train"}
_MARKS = _SPLITS | {"best", "ema", "worst", "min", "max", "std", "previous", "last", "running", "smoothed"}


@dataclass(frozen=True)
class Labelled:
    """A number in a line.

    Attributes:
        label: What stands before it, as it is printed.
        words: What that means: in lower case, one word for the same thing, in order of the alphabet.
        value: The number; of `9897/10000` the share.
    """

    label: str
    words: tuple[str, ...]
    value: float


def numbers_of(line: str) -> list[Labelled]:
    """Return the numbers of a line that have a label, in their order."""
    line = _COLOURS.sub("", line)[:2000]
    found: list[Labelled] = []
    end, carried = 0, ""
    for match in _NUMBER.finditer(line):
        if match.start() < end:
            continue  # the second number of `3/10`
        before = line[end : match.start()]
        if "|" in before or ";" in before:
            carried = ""
        out_of = _OUT_OF.match(line, match.end())
        end = out_of.end() if out_of else match.end()
        segment = _BREAKS.split(before.rstrip(" :=\t"))[-1]
        label = segment.strip(" :=\"'*#>\t")
        words = set(meant(label))
        if header := _HEADER.match(segment):
            splits = _SPLITS & set(meant(header["words"]))
            carried = splits.pop() if len(splits) == 1 else carried
        if words and carried and not words & _SPLITS:
            words.add(carried)
        if not words or not re.search(r"[^\W\d]", label):
            continue
        value = float(match[0].replace("_", ""))
        if out_of and float(out_of[1]):
            value /= float(out_of[1])
        found.append(Labelled(label, tuple(sorted(words)), value))
    return found


def meant(label: str) -> tuple[str, ...]:
    """Return a label's words, one word for the same thing, in order of the alphabet: "Validation Loss" -> loss, val."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", label)  # valLoss
    words = (_SAME.get(word, word) for word in _WORDS.findall(spaced.lower()))
    return tuple(sorted({word for word in words if word not in _EMPTY}))


def fits(wanted: tuple[str, ...], words: tuple[str, ...]) -> bool:
    """Whether a number's words name what is wanted: all of its words, and no other that makes another thing of it.

    `loss` does not fit `val loss`, nor does `val_loss` fit `best val loss`; `val_loss` fits `fold val loss`.
    """
    left = set(words) - set(wanted)
    return bool(wanted) and set(wanted) <= set(words) and not left & _MARKS
