"""Track: the state of one run of a training at each moment, in a folder that other runs compare with."""

from __future__ import annotations

import io
import mmap
import pickle
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_POLL = 0.01  # seconds between two looks for a moment that is not yet written
_DONE = "done"
_LENGTH = 8  # bytes of the number that a file begins with
_ALIGNED = 64  # bytes: a tensor begins at a multiple of this


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

    def _path(self, number: int, kind: str = "moment") -> Path:
        return self.folder / f"{number:06d}.{kind}"

    def write(self, moment: Moment) -> None:
        """Append a moment atomically."""
        if moment.values is not None:
            # Written first, as followers read it as soon as the moment itself is there.
            _write(moment.values, self._path(self.length, "values"))
        _write(vars(moment) | {"values": None}, self._path(self.length))
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
        return Moment(**_read(path))

    def values(self) -> dict[str, torch.Tensor] | None:
        """Return the tensor values of the moment that was read last; None if only digests were kept.

        They are much larger than the rest, and a comparison of digests needs them only if one differs.
        """
        path = self._path(self.length - 1, "values")
        if not path.exists():
            return None
        values: dict[str, torch.Tensor] = _read(path)
        return values


# A track is written and read by processes of one check, in its own folder, so it is a pickle, as a batch may hold
# classes of the script. Tensors follow it as they lie in memory: followers map them in place of reading them, which
# `torch.load` takes 40 times as long for.


class _Pickler(pickle.Pickler):
    """Leaves the contents of dense tensors to the `buffer_callback`."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or not obj.numel() or obj.is_quantized:
            return NotImplemented  # as torch pickles it
        plain = obj.detach().resolve_conj().resolve_neg().cpu().contiguous()
        content = pickle.PickleBuffer(plain.reshape(-1).view(torch.uint8).numpy().data)
        return _tensor, (content, obj.dtype, tuple(obj.shape))


def _tensor(content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(content, dtype=dtype).view(shape)


def _write(value: Any, path: Path) -> None:
    """Write a value: the length of its pickle, which begins with the sizes of the tensors; the pickle; the tensors."""
    pickled, contents = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(pickled, 5, buffer_callback=contents.append).dump(value)
    raws = [content.raw() for content in contents]
    head = pickle.dumps((pickled.getvalue(), [raw.nbytes for raw in raws]))
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        file.write(len(head).to_bytes(_LENGTH, "little") + head)
        for raw in raws:
            file.write(bytes(-file.tell() % _ALIGNED))
            file.write(raw)
    unfinished.replace(path)


def _read(path: Path) -> Any:
    """Return a value; its tensors are maps of the file, and writing to them leaves it as it is."""
    with path.open("rb") as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    at = _LENGTH + int.from_bytes(whole[:_LENGTH], "little")
    pickled, sizes = pickle.loads(whole[_LENGTH:at])
    raws = []
    for size in sizes:
        at += -at % _ALIGNED
        raws.append(whole[at : at + size])
        at += size
    return pickle.loads(pickled, buffers=raws)
