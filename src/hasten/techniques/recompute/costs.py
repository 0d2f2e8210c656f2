"""Measures the cost of keeping a block's activations and of recomputing them, while a training runs."""

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
    """One block, as a trial measured it.

    Attributes:
        path: Where it stands in the model ("blocks.0").
        kind: Its class.
        seconds: To compute its activations again, a step.
        bytes: Of the activations that are dropped, a step.
        order: When it was called first, among the blocks.
    """

    path: str
    kind: str
    seconds: float
    bytes: int
    order: int


class Meter:
    """Measures one block; a technique makes it where it was asked to."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._bytes = self._ahead = self._most_ahead = 0
        self._order = -1
        self._elapsed: deque[Callable[[], float]] = deque(maxlen=64)

    def forward(self, dropped: Iterable[Any], stays: set[int]) -> None:
        """Note what a forward of the block lets go.

        Args:
            dropped: Its tensors.
            stays: Addresses of memory that is there anyway: weights, inputs, what the block returns.
        """
        if self._order < 0:
            self._order = next(_order)
        storages = {one.data_ptr(): one.nbytes() for one in (tensor.untyped_storage() for tensor in dropped)}
        self._bytes = max(self._bytes, sum(size for address, size in storages.items() if address not in stays))
        # A block that is called several times before the backward keeps so many times as much.
        self._ahead += 1
        self._most_ahead = max(self._most_ahead, self._ahead)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Time what computes it again."""
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
        """Return what was measured, behind a wait for a GPU; None where the block was never computed again."""
        import torch

        if not self._elapsed:
            return None
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds = statistics.median(elapsed() for elapsed in self._elapsed)
        times = self._most_ahead
        return BlockCost(path, self.kind, times * seconds, times * self._bytes, self._order)
