"""How far an attempt came, and whether its memory rises each step: lines in a file, there after a kill too."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from pathlib import Path

NAME = "course"
_FEWEST = 8  # steps of the later half that tell a rise from chance
_RISING = 0.85  # of all pairs of steps, the later one holds more: 0.5 where nothing rises
_LEAST, _SHARE = 1 << 20, 0.0025  # bytes a step, and of what is held: less may be the C library's


@dataclass(frozen=True)
class AttemptProgress:
    """Progress of an attempt, read from its file.

    Attributes:
        stage: "start" (torch was not imported yet), "loading" (no training yet) or "training".
        grows: Bytes by which memory rises with each step of the later half, again and again; 0: it does not.
    """

    stage: str = "start"
    grows: float = 0.0


class ProgressWriter:
    """Writes it, in the process that trains."""

    def __init__(self, folder: Path) -> None:
        # A line at a time: the next allocation may end the process. Spawned workers of loaders come here as well.
        self._file = (folder / NAME).open("a", buffering=1)
        self._file.write("loading\n")

    def training(self) -> None:
        """The first forward begins."""
        self._file.write("training\n")

    def step(self, held: int) -> None:
        """A step is over, and so many bytes are held."""
        self._file.write(f"{held}\n")


def read_course(folder: Path) -> AttemptProgress:
    """Return what an attempt's file in a folder says."""
    try:
        lines = (folder / NAME).read_text().split()
    except OSError:
        return AttemptProgress()
    held = [int(line) for line in lines if line.isdecimal()]
    return AttemptProgress("training" if "training" in lines else "loading", rise_of(held))


def rise_of(held: list[int]) -> float:
    """Return the bytes by which memory rises with each step; 0 where it does not.

    Of the later half, which sees the same batches again: what fills up in a first pass over the data is full then.
    """
    later = held[len(held) // 2 :]
    if len(later) < _FEWEST:
        return 0.0
    gaps = range(1, len(later))
    pairs = [(late - early, gap) for gap in gaps for early, late in zip(later, later[gap:], strict=False)]
    slope = statistics.median(more / gap for more, gap in pairs)
    at_once = sum(late > early for early, late in itertools.pairwise(later))
    if 2 * at_once < len(later) - 1:
        return 0.0  # a few jumps: caches that a validation, or a new pass, has filled
    rising = sum((more > 0) + (more >= 0) for more, _ in pairs) / (2 * len(pairs))
    return slope if rising >= _RISING and slope >= max(_LEAST, _SHARE * later[0]) else 0.0
