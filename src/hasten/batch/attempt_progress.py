"""Record how far an attempt came and how much memory each step holds, in a file that survives a kill.

The training's process appends a line per event; the parent reads the file afterwards and estimates from it whether
memory keeps rising.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from pathlib import Path

NAME = "course"
_FEWEST = 8  # steps in the later half that are needed to tell a rise from chance
_RISING = 0.85  # share of step pairs in which the later step must hold more; 0.5 is expected if nothing rises
_LEAST, _SHARE = 1 << 20, 0.0025  # least rise per step: bytes, and share of what is held; less may be the C library's


@dataclass(frozen=True)
class AttemptProgress:
    """Progress of an attempt, read from its file.

    Attributes:
        stage: "start" (torch was not imported yet), "loading" (no training yet) or "training".
        grows: Bytes by which memory keeps rising with each step of the later half; 0 if it does not.
    """

    stage: str = "start"
    grows: float = 0.0


class ProgressWriter:
    """Writes the progress file, in the training's process."""

    def __init__(self, folder: Path) -> None:
        # Line-buffered, since the next allocation may end the process; appending, since spawned loader workers run this
        # code too.
        self._file = (folder / NAME).open("a", buffering=1)
        self._file.write("loading\n")

    def training(self) -> None:
        """Record that the first forward begins."""
        self._file.write("training\n")

    def step(self, held: int) -> None:
        """Record the end of a step, after which `held` bytes are in use."""
        self._file.write(f"{held}\n")


def read_progress(folder: Path) -> AttemptProgress:
    """Return the progress that the attempt wrote to its file in `folder`."""
    try:
        lines = (folder / NAME).read_text().split()
    except OSError:
        return AttemptProgress()
    held = [int(line) for line in lines if line.isdecimal()]
    return AttemptProgress("training" if "training" in lines else "loading", rise_of(held))


def rise_of(bytes_held: list[int]) -> float:
    """Return the bytes by which memory rises with each step; 0 if it does not.

    Uses the later half, which sees the same batches again: caches that fill in a first pass over the data are full by
    then. The slope is the median over all pairs of steps (Theil-Sen), which a few jumps do not change.
    """
    later = bytes_held[len(bytes_held) // 2 :]
    if len(later) < _FEWEST:
        return 0.0
    gaps = range(1, len(later))
    differences = [(late - early, gap) for gap in gaps for early, late in zip(later, later[gap:], strict=False)]
    slope = statistics.median(difference / gap for difference, gap in differences)
    at_once = sum(late > early for early, late in itertools.pairwise(later))
    if 2 * at_once < len(later) - 1:
        return 0.0  # it rose in a few jumps only: caches that a validation, or a new pass, filled
    # Counts a tie as half a rise.
    rising = sum((difference > 0) + (difference >= 0) for difference, _ in differences) / (2 * len(differences))
    return slope if rising >= _RISING and slope >= max(_LEAST, _SHARE * later[0]) else 0.0
