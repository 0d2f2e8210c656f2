"""Track: the state of one run of a training at each moment, in a folder that other runs compare with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hasten.files import replacing

_POLL = 0.01  # seconds between two looks for a moment that is not yet written
_DONE = "done"


@dataclass
class Moment:
    """The state of a training at one moment.

    Attributes:
        kind: "batch", "step", "validation" or "end".
        place: Position in words: "optimizer step 3".
        texts: Name -> text that must be equal: digests of random states, options.
        digests: Name -> digest of a tensor.
        values: Name -> tensor. None if only digests were kept, and in moments that were read (see `Track.values`).
        random: The process-wide random states, as `hasten.data.rng.state` returns them.
        carried: The pickled batch, for runs that draw other ones; None if it is too large.
        cut: Only at the end: whether the check's bounds ended the run, rather than the script.
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
    """Sequence of moments in a folder: one file per moment, and one for its tensor values if it has some.

    Args:
        folder: The folder; created if it does not exist.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.length = 0
        # torch's plain functions: hasten's taps replace `torch.save` and `torch.load`.
        self._save, self._load = torch.serialization.save, torch.serialization.load

    def _path(self, number: int, kind: str = "moment") -> Path:
        return self.folder / f"{number:06d}.{kind}"

    def write(self, moment: Moment) -> None:
        """Append a moment atomically."""
        if moment.values is not None:
            # Written first, as followers read it as soon as the moment itself is there.
            with replacing(self._path(self.length, "values"), durable=False) as file:
                self._save(moment.values, file)
        with replacing(self._path(self.length), durable=False) as file:
            self._save(vars(moment) | {"values": None}, file)
        self.length += 1

    def close(self) -> None:
        """Mark the track as complete."""
        (self.folder / _DONE).touch()

    def read(self) -> Moment | None:
        """Return the next moment, waiting until it is written; None at the track's end."""
        path = self._path(self.length)
        while not path.exists():
            if (self.folder / _DONE).exists() and not path.exists():
                return None
            time.sleep(_POLL)
        self.length += 1
        # Not `weights_only`: a batch may hold classes of the script. Another process of this check wrote the file.
        return Moment(**self._load(path, map_location="cpu", weights_only=False))

    def values(self) -> dict[str, torch.Tensor] | None:
        """Return the tensor values of the moment that was read last; None if only digests were kept.

        They are much larger than the rest, and a comparison of digests needs them only if one differs.
        """
        path = self._path(self.length - 1, "values")
        if not path.exists():
            return None
        values: dict[str, torch.Tensor] = self._load(path, map_location="cpu", weights_only=False)
        return values
