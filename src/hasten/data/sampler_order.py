"""Decides which samplers' indices can be drawn ahead of the training, and draws them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


def why_not(sampler: Any) -> str:
    """Return why this sampler's indices must not be drawn ahead of the training; "" if they may."""
    kind = type(sampler)
    if kind is BatchSampler:
        return why_not(sampler.sampler)
    # The code check catches a script that has patched `RandomSampler.__iter__`.
    if kind not in _SAMPLERS or kind.__iter__.__code__.co_filename != sys.modules[kind.__module__].__file__:
        return f"the order of {kind.__name__} may depend on the training"
    drawn_later = kind is RandomSampler and (sampler.replacement or sampler.num_samples > len(sampler.data_source))
    return "its sampler goes on drawing during a pass" if drawn_later else ""


def batches(indices: Iterator[int], sampler: Any) -> Iterator[list[int]]:
    """Yield the indices in batches, as BatchSampler does."""
    while batch := list(itertools.islice(indices, sampler.batch_size)):
        if sampler.drop_last and len(batch) < sampler.batch_size:
            return
        yield batch


def batching(sampler: Any) -> Any:
    """Return the settings by which a BatchSampler forms batches; None for no sampler."""
    return None if sampler is None else (sampler.batch_size, sampler.drop_last)


class Positions:
    """The order of a SubsetRandomSampler, drawn ahead as positions in its `indices`.

    The sampler looks up `indices` only when a batch is due, and a script may change that list during a pass. So only
    positions are drawn ahead, and looked up later. For other samplers this class passes everything through.

    Args:
        loader: The loader with the sampler.
        order: torch's iterator over the sampler, used for other samplers.
    """

    def __init__(self, loader: Any, order: Iterator[Any]) -> None:
        batching = loader.batch_sampler
        sampler = loader.sampler if batching is None else getattr(batching, "sampler", None)
        its_own = loader._index_sampler is (loader.sampler if batching is None else batching)  # a trial shortens it
        self._sampler = sampler if its_own and type(sampler) is SubsetRandomSampler else None
        if self._sampler is not None:
            drawn = self._drawn()
            order = drawn if batching is None else batches(drawn, batching)
        self.order = order

    def _drawn(self) -> Iterator[int]:
        sampler: Any = self._sampler
        yield from torch.randperm(len(sampler.indices), generator=sampler.generator).tolist()

    def indices(self, positions: Any) -> Any:
        """Return the indices now stored at these positions."""
        if self._sampler is None:
            return positions
        if isinstance(positions, list):
            return [self._sampler.indices[i] for i in positions]
        return self._sampler.indices[positions]

    def exchanged(self, now: Any, sent: Any) -> bool:
        """Return whether the indices of the next batch differ from those that were sent to a worker."""
        return self._sampler is not None and bool(sent) and repr(now) != repr(sent[0])
