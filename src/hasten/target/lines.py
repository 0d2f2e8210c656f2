"""Numbers in what a script prints, each with the words that name it.

No format is asked for: a label is what stands before a number. So these are read: `epoch 3: validation loss 1.93`,
`step 250: train loss 2.1, val loss 2.2`, `{'eval_loss': 1.93}`, `Test set: Average loss: 0.03, Accuracy: 9897/10000`,
` * Acc@1 71.2 Acc@5 90.1`, `val/loss=1.93`, a progress bar's line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
