"""Track: what one run of a training held at each moment, kept in a folder for other runs to compare with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hasten.files import replacing

_POLL = 0.01  # seconds between looks for a moment that is not written yet
_DONE = "done"


@dataclass
class Moment:
    """The state of a training at one moment.

    Attributes:
        kind: "batch", "step", "validation" or "end".
        place: In words: "optimizer step 3".
        texts: Name -> text that must be equal: digests of random states, options.
        digests: Name -> digest of a tensor.
        values: Name -> the tensor; None where only digests were kept, and in a moment that was read: `Track.values`.
        random: The process-wide random states, as `hasten.data.rng.state` returns them.
        carried: The batch itself, pickled, for runs that draw other ones; None where it is too large.
        cut: Of the end: whether the check's bounds ended the run, not the script.
    """

    kind: str
    place: str
    texts: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    values: dict[str, torch.Tensor] | None = None
    random: dict[str, Any] | None = None
    carried: bytes | None = None
    cut: bool = False


class Track:
    """Moments in the order in which they came, a file each, and one for the values of each that has some.

    Args:
        folder: Where they are; made if it is not there.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.length = 0
        # The functions themselves: hasten's taps replace the names in torch.
        self._save, self._load = torch.serialization.save, torch.serialization.load

    def _path(self, number: int, kind: str = "moment") -> Path:
        return self.folder / f"{number:06d}.{kind}"

    def write(self, moment: Moment) -> None:
        """Append a moment. Who follows sees it whole or not at all."""
        if moment.values is not None:
            with replacing(self._path(self.length, "values"), durable=False) as file:  # before who follows looks
                self._save(moment.values, file)
        with replacing(self._path(self.length), durable=False) as file:
            self._save(vars(moment) | {"values": None}, file)
        self.length += 1

    def close(self) -> None:
        """Say that no moment follows."""
        (self.folder / _DONE).touch()

    def read(self) -> Moment | None:
        """Return the next moment, waiting until it is written; None at the track's end."""
        path = self._path(self.length)
        while not path.exists():
            if (self.folder / _DONE).exists() and not path.exists():
                return None
            time.sleep(_POLL)
        self.length += 1
        # It was written by another process of the same training, whose own classes may be in a batch.
        return Moment(**self._load(path, map_location="cpu", weights_only=False))

    def values(self) -> dict[str, torch.Tensor] | None:
        """Return the values of the moment that was read last; None where only digests were kept.

        They are much the larger part, and who compares digests needs them only where one differs.
        """
        path = self._path(self.length - 1, "values")
        if not path.exists():
            return None
        values: dict[str, torch.Tensor] = self._load(path, map_location="cpu", weights_only=False)
        return values
