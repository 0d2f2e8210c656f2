"""Read a quality from a run's output: find the number that the goal names, and its values over time.

Each printed or logged line is searched for numbers with a label (`numbers_of`). Label and goal are reduced to sets of
normalized words (`normalized_words`), so that `val_loss` fits `Validation Loss: 1.9`. Fitting numbers are grouped by
`Kind`, and after the first run `Readings.choose_kind` picks the kind that the goal means, or refuses if several fit.
"""

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
    """A reported value, and when it was reported, in seconds from the start of the process."""

    seconds: float
    value: float


@dataclass(frozen=True)
class Kind:
    """Identifies one of the numbers that a script reports.

    Attributes:
        source: "printed", or "logged" (TensorBoard, hasten's CSVLogger).
        label: The text before the number, as written.
        head: The first word of the line: `Test: ... Acc@1 70` is another number than `Epoch: ... Acc@1 70`.
        exact: Whether the label has the same words as the goal's name, and no more.
    """

    source: str
    label: str
    head: str
    exact: bool

    def __str__(self) -> str:
        within = f', in lines that begin with "{self.head}"' if self.head and self.head not in self.label else ""
        return f'{self.source}: "{self.label}"{within}'


@dataclass
class Readings:
    """The readings of one run, by kind.

    Args:
        goal: The goal whose name is searched for.
        only: Text that a printed line must contain to count; "": every line counts.

    Attributes:
        by_kind: Kind -> its readings in order of time, for kinds whose label fits the goal's name.
        other_labels: Labels that do not fit, for an error message.
        examples: Kind -> the first line with it.
    """

    goal: Goal
    only: str = ""
    by_kind: dict[Kind, list[Reading]] = field(default_factory=dict)
    other_labels: set[str] = field(default_factory=set)
    examples: dict[Kind, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._goal_words = normalized_words(self.goal.name)

    def add_line(self, source: str, line: str, seconds: float) -> None:
        """Take in a line that was reported `seconds` after the start."""
        if self.only and source == PRINTED and self.only not in line:
            return
        head = next(iter(re.findall(r"[^\W\d_]{2,}", line)), "") if source == PRINTED else ""
        for number in numbers_of(line):
            if not fits(self._goal_words, number.words):
                if len(self.other_labels) < 1000:
                    self.other_labels.add(number.label)
                continue
            kind = Kind(source, number.label, head, number.words == self._goal_words)
            self.by_kind.setdefault(kind, []).append(Reading(seconds, number.value))
            self.examples.setdefault(kind, line.strip()[:160])

    def of_kind(self, kind: Kind) -> list[Reading]:
        """Return the readings of a kind, in order of time."""
        return self.by_kind.get(kind, [])

    def choose_kind(self) -> Kind:
        """Return the kind that the goal means.

        Raises:
            HastenError: No number fits the goal's name, or several do.
        """
        if not self.by_kind:
            raise HastenError(f"the run reported no {self.goal.name!r}{self._labels_reported()}", self._fix())
        kinds = list(self.by_kind)
        # Each preference narrows the choice, unless it would leave nothing.
        for preference in (
            [kind for kind in kinds if kind.source == PRINTED],
            [kind for kind in kinds if kind.exact],
            [kind for kind, readings in self.by_kind.items() if len(readings) > 1],
        ):
            preferred = [kind for kind in kinds if kind in preference]
            kinds = preferred or kinds
        if len(kinds) > 1:
            lines = "".join(f"\n  {self.examples[kind]}" for kind in kinds[:_SHOWN])
            raise HastenError(
                f"{self.goal.name!r} may be one of {len(kinds)} numbers that the run reports:{lines}",
                "say which lines are meant: --target-line TEXT counts only lines that hold TEXT",
            )
        return kinds[0]

    def _labels_reported(self) -> str:
        names = sorted(self.other_labels, key=lambda name: (len(name), name))[:_SHOWN]
        return f"; it reported {', '.join(map(repr, names))}" if names else ", nor any other number with a name"

    def _fix(self) -> str:
        return (
            "name it as the script prints it, or have it print a line such as `val_loss 1.93` at each validation; "
            "what goes to TensorBoard is seen too"
        )


class FileTail:
    """Reads the lines that a process appends to a file, as they come.

    Args:
        path: The file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._incomplete = b""

    def lines(self, to_end: bool = False) -> list[str]:
        """Return the lines that came since the last call; with `to_end`, an unfinished line too."""
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return []
        pieces = _LINE.split(self._incomplete + self._file.read())
        self._incomplete = pieces.pop()[-_MOST_KEPT:]
        if to_end:
            pieces.append(self._incomplete)
            self._incomplete = b""
        return [text for piece in pieces if (text := piece.decode("utf-8", "replace").strip())]

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
_BREAKS = re.compile(r"[,;|\t{}\[\]()]|\s-\s|\s{3,}")  # text before it is not part of the label of a later number
_HEADER = re.compile(r"^\W*(?P<words>[\w ]{2,40}?)\s*:\s*\S")  # in `val: loss 0.4 acc 0.8`, "val" applies to both
_WORDS = re.compile(r"@?[^\W_]+(?:@\d+)?")

_SYNONYMS = {
    "validation": "val", "valid": "val", "eval": "val", "evaluation": "val", "dev": "val",
    "testing": "test", "training": "train", "accuracy": "acc", "perplexity": "ppl", "top1": "acc@1", "top5": "acc@5",
}  # fmt: skip
# Words of a label that are ignored.
_IGNORED = {"average", "avg", "mean", "set", "total", "epoch", "on", "the", "of", "is", "results", "result", "metrics"}
_SPLITS = {"val", "test", "train"}
# Words that make it another quality: `best val loss` is not `val loss`.
_MARKS = _SPLITS | {"best", "ema", "worst", "min", "max", "std", "previous", "last", "running", "smoothed"}


@dataclass(frozen=True)
class LabelledNumber:
    """A number in a line, with its label.

    Attributes:
        label: The text before the number, as printed.
        words: The label's normalized words, in alphabetical order (see `normalized_words`).
        value: The number; the share for a fraction such as `9897/10000`.
    """

    label: str
    words: tuple[str, ...]
    value: float


def numbers_of(line: str) -> list[LabelledNumber]:
    """Return the labelled numbers of a line, in order."""
    line = _COLOURS.sub("", line)[:2000]
    labelled: list[LabelledNumber] = []
    end, carried = 0, ""  # `carried`: the split named by a header, for the numbers after it
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
        words = set(normalized_words(label))
        if header := _HEADER.match(segment):
            splits = _SPLITS & set(normalized_words(header["words"]))
            carried = splits.pop() if len(splits) == 1 else carried
        if words and carried and not words & _SPLITS:
            words.add(carried)
        if not words or not re.search(r"[^\W\d]", label):
            continue
        value = float(match[0].replace("_", ""))
        if out_of and float(out_of[1]):
            value /= float(out_of[1])
        labelled.append(LabelledNumber(label, tuple(sorted(words)), value))
    return labelled


def normalized_words(label: str) -> tuple[str, ...]:
    """Return a label's words, normalized: lower case, synonyms merged, sorted. "Validation Loss" -> loss, val."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", label)  # valLoss
    words = (_SYNONYMS.get(word, word) for word in _WORDS.findall(spaced.lower()))
    return tuple(sorted({word for word in words if word not in _IGNORED}))


def fits(goal_words: tuple[str, ...], words: tuple[str, ...]) -> bool:
    """Return whether a number's words name the wanted quality: all of its words, and none that marks another quality.

    Wanted `loss` does not fit `val loss`, nor does wanted `val_loss` fit `best val loss`; `val_loss` fits
    `fold val loss`.
    """
    extra = set(words) - set(goal_words)
    return bool(goal_words) and set(goal_words) <= set(words) and not extra & _MARKS
