"""Options of a process that records or follows a track. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RECORDS, FOLLOWS = "records", "follows"


@dataclass(frozen=True)
class WitnessOptions:
    """How a training is witnessed.

    Attributes:
        track: Folder of the track, which one process records and any number follow.
        result: File to which the process writes what it saw, as JSON.
        role: "records" or "follows".
        exact: Compare bits, and end at the first that differs. Otherwise measure each difference, and go on from the
            track's state.
        redraws: The plan may draw other random numbers: where batches or random states differ, note which, and go on
            with the track's.
        noise: Relative size of the random errors to put on what each operator computes; 0.0: none.
        seed: Of these errors.
        most_bytes: For the values in a track; a greater training keeps those of some steps only.
        expected_steps: How many steps will come, as far as is known; to share out `most_bytes`.
        resumed: Folder with what an earlier run saved; it is noted which of it the script reads. "": none.
    """

    track: str
    result: str
    role: str = RECORDS
    exact: bool = True
    redraws: bool = False
    noise: float = 0.0
    seed: int = 0
    most_bytes: int = 2 << 30
    expected_steps: int = 32
    resumed: str = ""

    def folders(self) -> tuple[str, str]:
        """Return the folders into which the process writes."""
        return str(Path(self.track).parent), str(Path(self.result).parent)
