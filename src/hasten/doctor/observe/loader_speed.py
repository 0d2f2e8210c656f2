"""Measure a loader's speed, rebuilt with another number of workers and drawn from without training.

The loader is rebuilt as a plain DataLoader with the script's options, dataset and samplers. A pass ends when its time
is up, because its sampler ends then.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hasten.evidence import Rate

_WINDOWS = 6  # windows that a pass is divided into
_PASSES = 12  # at most
_LATE = 3.0  # a worker count is given up after this many times its seconds
_HANGS = 60.0  # seconds without a batch after which workers count as hung


def speed(loader: Any, workers: int, seconds: float) -> Rate:
    """Measure the loader's rate with `workers` workers, in several passes of which the first is the longest.

    Args:
        loader: The script's loader.
        workers: How many workers to rebuild it with.
        seconds: About how long to measure.

    Raises:
        ValueError: The loader yields no batch.
        Exception: Any error of the dataset, or of starting a worker.
    """
    begin = time.perf_counter()
    rebuilt_loader = rebuilt(loader, workers)
    rebuilt_loader.until = begin + 0.6 * seconds
    rates: list[float] = []
    starts: list[float] = []
    batches = 0
    size = 0.0
    for number in range(_PASSES):
        started = time.perf_counter()
        times = [started]
        for batch in rebuilt_loader:
            times.append(time.perf_counter())
            size = size or _samples(loader, batch)
            if times[-1] - begin > _LATE * seconds:
                break
        if len(times) == 1:
            break  # an empty pass
        batches += len(times) - 1
        starts.append(times[1] - started)
        rates += _rates(times, workers)
        now = time.perf_counter()
        if (number and now - begin > 0.9 * seconds) or now - begin > _LATE * seconds:
            break
        rebuilt_loader.until = now + 0.25 * seconds
    rebuilt_loader._iterator = None  # ends the persistent workers
    if not batches:
        raise ValueError("the loader gave no batch at all")
    size = rebuilt_loader.sizes[0] / rebuilt_loader.sizes[1] if rebuilt_loader.sizes[1] else size
    batches_per_s = statistics.median(rates)
    return Rate(
        workers=workers,
        batches=batches,
        samples_per_s=batches_per_s * size,
        batches_per_s=batches_per_s,
        low=min(rates) * size,
        high=max(rates) * size,
        windows=len(rates),
        first_batch=starts[0],
        epoch_start=statistics.median(starts[1:]) if len(starts) > 1 else None,
    )


def _rates(times: list[float], workers: int) -> list[float]:
    """Return batches per second in each window of a pass.

    The first batches, which wait for workers to start, and the last, when workers run out of work, are left out.
    """
    turn = max(1, workers)  # workers take turns, so windows are multiples of a turn
    first, last = turn, len(times) - 1 - (turn if workers else 0)
    turns = (last - first) // turn
    if turns < 1:  # a short pass is one window, without the wait for the first batch if there are others
        first, last = (1, len(times) - 1) if len(times) > 2 else (0, 1)
        return [(last - first) / max(1e-9, times[last] - times[first])]
    length = max(1, turns // _WINDOWS) * turn
    edges = range(first, last + 1, length)
    return [length / max(1e-9, times[end] - times[start]) for start, end in pairwise(edges)]


def _samples(loader: Any, batch: Any) -> float:
    """Return the number of samples in a batch: `batch_size`, else the first size of its first tensor."""
    from torch.utils._pytree import tree_iter

    if isinstance(loader.batch_size, int):
        return float(loader.batch_size)
    shapes = (tuple(tensor.shape) for tensor in tree_iter(batch) if hasattr(tensor, "shape"))
    return float(next((shape[0] for shape in shapes if shape), 1))


def rebuilt(loader: Any, workers: int, init: Any = None) -> RebuiltLoader:
    """Return the same loader with another number of workers, which are persistent.

    Args:
        loader: The script's loader.
        workers: The number of workers.
        init: A `worker_init_fn` in place of the script's.
    """
    options: dict[str, Any] = {
        "num_workers": workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": max(float(loader.timeout), _HANGS) if workers else 0.0,
        "worker_init_fn": init or loader.worker_init_fn,
        "generator": loader.generator,
        "prefetch_factor": (loader.prefetch_factor or 2) if workers else None,
        "persistent_workers": workers > 0,
        "multiprocessing_context": loader.multiprocessing_context if workers else None,
        "in_order": getattr(loader, "in_order", True),
    }
    if isinstance(loader.dataset, IterableDataset):
        options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is not None:
        options["batch_sampler"] = loader.batch_sampler
    else:
        options |= {"batch_size": None, "sampler": loader.sampler}
    return RebuiltLoader(loader.dataset, **options)


class RebuiltLoader(DataLoader[Any]):
    """A DataLoader whose passes end at a given time, because their sampler ends.

    Attributes:
        until: When the pass is to end, by `time.perf_counter`; None: when the data ends.
        sizes: Two counts so far: samples requested by index, and the batches they were in.
    """

    until: float | None = None
    sizes: list[int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__["sizes"] = [0, 0]
        super().__init__(*args, **kwargs)

    @property
    def _index_sampler(self) -> Any:
        return _Until(self, super()._index_sampler)


class _Until:
    """A sampler that ends at the loader's `until`, after at least one batch."""

    def __init__(self, loader: RebuiltLoader, sampler: Any) -> None:
        self._loader = loader
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        sizes = self._loader.sizes
        for number, indices in enumerate(self._sampler):
            until = self._loader.until
            if number and until is not None and time.perf_counter() > until:
                return
            if isinstance(indices, list | tuple):
                sizes[0] += len(indices)
                sizes[1] += 1
            yield indices
