"""Record the contents of the training loader's first batches, and the shapes of all.

Each loader's batches are looked at, because which loader trains is known only later. Copies of a part of the first
batches are kept, and their statistics (mean, spread, padding) are computed when the training is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hasten.evidence import Inputs
from hasten.evidence.recorder import Recorder
from hasten.taps.protocol import Session

_FIRST = 64  # first batches of a loader, each of which is looked at
_INTERVAL = 16  # after these, every 16th batch is looked at
_SHAPES = 64  # distinct shapes to count, at most
_MOST_EXCERPTS = 4  # first batches of which a part is kept
_NUMBERS = 65_536  # numbers to keep of a batch, about
_STEPS_DISTURBED = 4


def install(session: Session) -> None:
    """Look at the batches of all loaders."""
    watch = InputWatch(session.recorder)
    session.observers.append(watch)
    session.on_batch.append(watch.on_batch)


@dataclass(slots=True)
class _Loader:
    """Shapes and samples of one loader's batches."""

    checked: int = 0  # batches that were looked at
    shapes: dict[tuple[int, ...], int] = field(default_factory=dict)
    dtype: str = ""
    excerpts: list[Any] = field(default_factory=list)  # copies of a part of each of the first batches


def statistics_of(batches: list[tuple[tuple[int, ...], Any]]) -> Inputs:
    """Return the statistics of batches that no loader yielded.

    Args:
        batches: Per batch, its shape and the part that was kept.
    """
    shapes = Counter(shape for shape, _ in batches)
    kind = str(batches[0][1].dtype).removeprefix("torch.")
    return Inputs(tuple(shapes.most_common()), len(batches), kind, **statistics([part for _, part in batches]))


class InputWatch:
    """Counts the shapes of each loader's batches, and keeps a part of the first ones.

    Args:
        recorder: Tells, when the training is over, which loader was trained on.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._loaders: dict[int, _Loader] = {}

    def on_batch(self, index: int, batch: Any) -> int:
        """Look at a batch. Return how many batches of this loader to skip before the next call.

        Args:
            index: The loader's number.
            batch: The batch that it yielded.
        """
        loader = self._loaders.get(index)
        if loader is None:
            loader = self._loaders[index] = _Loader()
        tensor = first_tensor(batch)
        if tensor is None:
            return _INTERVAL - 1
        loader.checked += 1
        shape = tuple(tensor.shape)
        if shape in loader.shapes or len(loader.shapes) < _SHAPES:
            loader.shapes[shape] = loader.shapes.get(shape, 0) + 1
        if len(loader.excerpts) < _MOST_EXCERPTS:
            loader.dtype = str(tensor.dtype).removeprefix("torch.")
            loader.excerpts.append(excerpt_of(tensor))
        return 0 if loader.checked < _FIRST else _INTERVAL - 1

    def facts(self) -> dict[str, Any]:
        """Return `inputs` of the loader with the most training batches, and the steps disturbed by the copies."""
        trained: dict[int, int] = {}
        for finished in self._recorder.passes:
            if finished.trained:
                trained[finished.loader] = trained.get(finished.loader, 0) + finished.batches
        most = max((index for index in trained if index in self._loaders), key=lambda i: trained[i], default=None)
        if most is None or not self._loaders[most].checked:
            return {}
        loader = self._loaders[most]
        shapes = sorted(loader.shapes.items(), key=lambda entry: -entry[1])
        inputs = Inputs(shapes=tuple(shapes), batches=loader.checked, dtype=loader.dtype, **statistics(loader.excerpts))
        return {"inputs": inputs, "disturbed": tuple(range(min(_STEPS_DISTURBED, self._recorder.steps)))}


def first_tensor(batch: Any, depth: int = 4) -> Any:
    """Return the first dense tensor in lists, tuples and mappings, up to `depth` levels deep; None without one."""
    import torch

    if isinstance(batch, torch.Tensor):
        return None if batch.is_nested or batch.layout != torch.strided else batch
    if depth:
        parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
        for part in parts:
            if (tensor := first_tensor(part, depth - 1)) is not None:
                return tensor
    return None


def excerpt_of(tensor: Any) -> Any:
    """Return a copy of about `_NUMBERS` numbers of a batch: some samples and, in images, some rows and columns."""
    tensor = tensor.detach()
    while tensor.dim() > 2 and tensor.numel() > 8 * _NUMBERS and max(tensor.shape[2:]) > 16:
        tensor = tensor[(slice(None), slice(None), *(slice(None, None, 2) for _ in tensor.shape[2:]))]
    if tensor.dim() and tensor.numel() > _NUMBERS:
        tensor = tensor[: max(1, tensor.shape[0] * _NUMBERS // tensor.numel())]
    if tensor.dim() > 1 and tensor.numel() > 8 * _NUMBERS:  # even one sample has too many numbers
        tensor = tensor[..., :: tensor.numel() // (4 * _NUMBERS)]
    return tensor.clone()


def statistics(parts: list[Any]) -> dict[str, Any]:
    """Return mean, spread, bounds or padding of parts of batches, as fields of `Inputs`.

    Parts of another dtype than the first are left out. Floating point and uint8 have a mean, 2-D integers padding.
    """
    import torch

    parts = [part.cpu() for part in parts if part.numel()]
    if not parts:
        return {}
    kind = parts[0].dtype
    parts = [part for part in parts if part.dtype == kind]
    if kind.is_floating_point or kind == torch.uint8:
        return _spread([part.float() for part in parts])
    if not kind.is_complex and kind != torch.bool and parts[0].dim() == 2:
        shares = [padding(part) for part in parts if part.dim() == 2]
        return {"padding": sum(shares) / len(shares)}
    return {}


def _spread(parts: list[Any]) -> dict[str, Any]:
    """Return mean, standard deviation and bounds of all numbers, and the largest of each over the channels."""
    import torch

    flat = torch.cat([part.reshape(-1) for part in parts])
    values = {"mean": flat.mean(), "std": flat.std(correction=0), "low": flat.min(), "high": flat.max()}
    width = {2: 1, 4: 1}.get(parts[0].dim())  # features of 2-D inputs, channels of images
    if width is not None and all(part.dim() == parts[0].dim() for part in parts):
        same = [part for part in parts if part.shape[width] == parts[0].shape[width]]
        columns = torch.cat([part.movedim(width, -1).reshape(-1, part.shape[width]) for part in same])
        values["last_mean"] = columns.mean(0).abs().max()
        values["last_std"] = columns.std(0, correction=0).max()
    return {name: float(value) for name, value in values.items()}


def padding(tensor: Any) -> float:
    """Return the share (0 to 1) of a 2-D integer tensor that is padding: runs of one value at the ends of rows.

    The padding value is the one that most rows end with. A row that ends with a single such value does not count as
    padded.
    """
    import torch

    ends = tensor[:, -1].tolist()
    value = max(set(ends), key=ends.count)
    same = torch.flip(tensor == value, [1]).long()
    runs = torch.cumprod(same, 1).sum(1)
    runs[runs < 2] = 0
    share: float = runs.sum().item() / tensor.numel()
    return share
