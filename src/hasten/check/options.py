"""Options of a process that records or follows a track. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RECORDS, FOLLOWS = "records", "follows"


@dataclass(frozen=True)
class WitnessOptions:
    """How a process records or follows a track.

    Attributes:
        track: Folder of the track, which one process records and any number follow.
        result: File to which the process writes its result, as JSON.
        role: "records" or "follows".
        exact: Compare bits, and end at the first difference. If False, measure each difference, and continue from the
            track's state.
        redraws: The plan may draw other random numbers: if batches or random states differ, note which, and continue
            with the track's.
        noise: Relative size of the random errors on each operator's result; 0.0 for none.
        seed: Seed of these errors.
        most_bytes: Most bytes of tensor values in a track. A larger training keeps the values of some steps only.
        expected_steps: Estimated number of steps, by which `most_bytes` is divided.
        resumed: Folder that an earlier run saved to, to note which files of it the script reads. "" for none.
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
