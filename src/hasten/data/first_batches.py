"""Splits the first batches of a pass over all workers, so that the first batch is ready sooner.

Problem: W workers make W batches at the same time, and the training waits until one worker has made a whole batch.
Approach: for the first W batches, each worker makes the samples of 1/W of the batch, and the main process collates
them. Megatron-Energon does the same with its `first N batches` (PR 40).
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

_TORCHS = {"torch", "numpy", "builtins"}  # packages of the types that torch registers collate functions for


class KeyedPart(KeyedBatch):
    """Some indices of a batch: a worker makes their samples, and the main process collates all parts."""

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyedPart, (list(self), self.seed, self.epoch, self.number)


class Packed:
    """The pickled samples of a part, and its faults, as a worker sends them.

    Args:
        samples: The samples that could be made.
        faults: The faults of those that could not.
    """

    def __init__(self, samples: list[Any], faults: list[Any]) -> None:
        # Pickle into one block of shared memory: each tensor sent alone would take a file descriptor.
        self.content = torch.frombuffer(bytearray(pack(samples)), dtype=torch.uint8)
        self.faults = faults

    def samples(self) -> list[Any]:
        """Unpickle and return the samples."""
        unpickled: list[Any] = pickle.loads(self.content.numpy().data)
        return unpickled


def splits(loader: Any) -> bool:
    """Return whether a loader's first batches can be split.

    The collate function must be torch's, which draws no random numbers, and nobody may have registered collate
    functions for other types than torch's, as those may draw.
    """
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
    """The stream of index lists sent to workers, with the first batches cut into parts.

    Args:
        workers: Number of workers, of parts per batch, and of batches to split; 0: split none.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._workers_left = workers
        self._cut: deque[KeyedPart] = deque()
        self._parts: deque[int] = deque()  # number of parts of each batch in flight

    def next(self, indices: Callable[[], Any]) -> Any:
        """Return the next indices to send; `indices` returns those of the next whole batch."""
        if not self._cut:
            batch = indices()
            if not self._workers_left or not isinstance(batch, KeyedBatch) or len(batch) < self._workers:
                self._workers_left = 0
                self._parts.append(1)
                return batch
            self._workers_left -= 1
            size, more = divmod(len(batch), self._workers)
            ends = [size * (number + 1) + min(more, number + 1) for number in range(self._workers)]
            for start, end in zip([0, *ends], ends, strict=False):
                self._cut.append(KeyedPart(batch[start:end], batch.seed, batch.epoch, batch.number))
            self._parts.append(self._workers)
        return self._cut.popleft()

    def parts(self) -> int:
        """Return the number of parts of the next batch to arrive."""
        return self._parts.popleft() if self._parts else 1


def in_memory_order(batch: Any) -> Any:
    """Return a batch with contiguous tensors, as if collated in a worker, where torch stacks into shared memory."""
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
