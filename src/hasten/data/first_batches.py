"""Splits the first batches of a pass over all workers: the training waits for a part of a batch, not for a whole.

Without it, W workers make W batches at the same time, and the first is there when one worker has made all of its
samples. Energon does the same by its `first N batches` (its PR 40).
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data._utils.collate import default_collate, default_collate_fn_map

from hasten.data.elastic import KeyedBatch
from hasten.data.sample_store import pack

_TORCHS = {"torch", "numpy", "builtins"}  # where types come from that torch itself knows how to collate


class KeyedPart(KeyedBatch):
    """Some of a batch's indices: its samples are made, and collated by who has all parts."""

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyedPart, (list(self), self.seed, self.epoch, self.number)


class Packed:
    """Samples of a part, and the faults of others, on their way from a worker.

    Args:
        samples: Those that could be made.
        faults: Of those that could not.
    """

    def __init__(self, samples: list[Any], faults: list[Any]) -> None:
        # One block of shared memory: a sample's tensors one by one would each take a file descriptor.
        self.content = torch.frombuffer(bytearray(pack(samples)), dtype=torch.uint8)
        self.faults = faults

    def samples(self) -> list[Any]:
        """Return the samples."""
        found: list[Any] = pickle.loads(self.content.numpy().data)
        return found


def splits(loader: Any) -> bool:
    """Whether a loader's first batches can be split: its collate function is torch's, which draws nothing, and looks at
    samples of torch's types alone."""
    known = all(
        kind.__module__.partition(".")[0] in _TORCHS
        for key in default_collate_fn_map
        for kind in (key if isinstance(key, tuple) else (key,))
    )
    return (
        known
        and loader.num_workers > 1
        and loader.collate_fn is default_collate
        and not hasattr(loader.dataset, "read_batch")
        and not hasattr(loader.dataset, "__getitems__")
    )


class SplitIndices:
    """The indices that workers get: those of the first batches in parts.

    Args:
        workers: How many, and how many batches are split; 0: none is.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._left = workers
        self._cut: deque[KeyedPart] = deque()
        self._parts: deque[int] = deque()  # of each batch that is on its way

    def next(self, indices: Callable[[], Any]) -> Any:
        """Return the next indices for a worker; `indices` gives those of the next batch."""
        if not self._cut:
            batch = indices()
            if not self._left or not isinstance(batch, KeyedBatch) or len(batch) < self._workers:
                self._left = 0
                self._parts.append(1)
                return batch
            self._left -= 1
            size, more = divmod(len(batch), self._workers)
            ends = [size * (number + 1) + min(more, number + 1) for number in range(self._workers)]
            for start, end in zip([0, *ends], ends, strict=False):
                self._cut.append(KeyedPart(batch[start:end], batch.seed, batch.epoch, batch.number))
            self._parts.append(self._workers)
        return self._cut.popleft()

    def parts(self) -> int:
        """Return of how many parts the next batch that comes back consists."""
        return self._parts.popleft() if self._parts else 1


def in_memory_order(batch: Any) -> Any:
    """Return a batch with contiguous tensors, as torch's workers make them, which stack into shared memory."""
    if isinstance(batch, torch.Tensor):
        return batch.contiguous() if batch.layout == torch.strided else batch
    if isinstance(batch, dict):
        for name in batch:
            batch[name] = in_memory_order(batch[name])
    elif type(batch) is list:
        batch[:] = map(in_memory_order, batch)
    elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(in_memory_order, batch))
    return batch
