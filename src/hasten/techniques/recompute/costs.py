"""Measure, while a training runs, how many bytes a block's activations take and how long recomputing them takes."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_order = itertools.count()


@dataclass(frozen=True)
class BlockCost:
    """Cost of one block, as a trial measured it.

    Attributes:
        path: Path of the block in the model ("blocks.0").
        kind: Name of its class.
        seconds: Seconds per step to recompute its activations.
        bytes: Bytes per step of the activations that are dropped.
        order: Rank among the blocks by their first call.
    """

    path: str
    kind: str
    seconds: float
    bytes: int
    order: int


class BlockMeter:
    """Measure one block, for a technique that was asked to (`ActivationCheckpointing.measure`).

    Args:
        kind: Name of the block's class.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._bytes = self._ahead = self._most_ahead = 0
        self._order = -1
        self._elapsed: deque[Callable[[], float]] = deque(maxlen=64)

    def forward(self, dropped: Iterable[Any], stays: set[int]) -> None:
        """Record what a forward of the block dropped.

        Args:
            dropped: The dropped tensors.
            stays: Addresses of memory that exists anyway: of weights, inputs and the block's outputs.
        """
        if self._order < 0:
            self._order = next(_order)
        storages = {
            storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in dropped)
        }
        self._bytes = max(self._bytes, sum(size for address, size in storages.items() if address not in stays))
        # A block that is called n times before the backward would keep n times as much.
        self._ahead += 1
        self._most_ahead = max(self._most_ahead, self._ahead)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Time the recomputation that runs within the context; on a GPU by events, without waiting for it."""
        import torch

        self._ahead = 0
        if not torch.cuda.is_initialized():
            start = time.perf_counter()
            yield
            seconds = time.perf_counter() - start
            self._elapsed.append(lambda: seconds)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._elapsed.append(lambda: 1e-3 * begin.elapsed_time(end))

    def cost(self, path: str) -> BlockCost | None:
        """Return the measured cost, after waiting for the GPU; None if the block was never recomputed."""
        import torch

        if not self._elapsed:
            return None
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds = statistics.median(elapsed() for elapsed in self._elapsed)
        times = self._most_ahead
        return BlockCost(path, self.kind, times * seconds, times * self._bytes, self._order)
