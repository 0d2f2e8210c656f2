"""Which samplers' indices can be drawn ahead of the training."""

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
    """Return why indices of this sampler must not be drawn ahead of the training; "" where they may."""
    kind = type(sampler)
    if kind is BatchSampler:
        return why_not(sampler.sampler)
    if kind not in _SAMPLERS or kind.__iter__.__code__.co_filename != sys.modules[kind.__module__].__file__:
        return f"the order of {kind.__name__} may depend on the training"
    drawn_later = kind is RandomSampler and (sampler.replacement or sampler.num_samples > len(sampler.data_source))
    return "its sampler goes on drawing during a pass" if drawn_later else ""


def batches(indices: Iterator[int], sampler: Any) -> Iterator[list[int]]:
    """Yield the batches that BatchSampler makes of indices."""
    while batch := list(itertools.islice(indices, sampler.batch_size)):
        if sampler.drop_last and len(batch) < sampler.batch_size:
            return
        yield batch


def batching(sampler: Any) -> Any:
    """Return what decides how a BatchSampler puts indices into batches."""
    return None if sampler is None else (sampler.batch_size, sampler.drop_last)


class Positions:
    """The order of a SubsetRandomSampler as positions in its `indices`, which it reads at each batch, not before.

    Args:
        loader: Whose sampler it is.
        order: torch's own iterator, where the sampler is another.
    """

    def __init__(self, loader: Any, order: Iterator[Any]) -> None:
        batching = loader.batch_sampler
        sampler = loader.sampler if batching is None else getattr(batching, "sampler", None)
        its_own = loader._index_sampler is (loader.sampler if batching is None else batching)  # a trial cuts it
        self._sampler = sampler if its_own and type(sampler) is SubsetRandomSampler else None
        if self._sampler is not None:
            drawn = self._drawn()
            order = drawn if batching is None else batches(drawn, batching)
        self.order = order

    def _drawn(self) -> Iterator[int]:
        sampler: Any = self._sampler
        yield from torch.randperm(len(sampler.indices), generator=sampler.generator).tolist()

    def indices(self, positions: Any) -> Any:
        """Return the indices that stand there now."""
        if self._sampler is None:
            return positions
        if isinstance(positions, list):
            return [self._sampler.indices[i] for i in positions]
        return self._sampler.indices[positions]

    def exchanged(self, now: Any, sent: Any) -> bool:
        """Whether other indices stand there now than those that were sent to a worker."""
        return self._sampler is not None and bool(sent) and repr(now) != repr(sent[0])
