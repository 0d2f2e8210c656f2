"""How fast a loader goes, rebuilt with another number of workers and drawn from as fast as it gives."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hasten.evidence import Rate

_WINDOWS = 6  # of a pass
_PASSES = 12
_LATE = 3.0  # times its seconds, after which a number of workers is left as it is
_HANGS = 60.0  # seconds without a batch after which workers are taken to hang


def speed(loader: Any, workers: int, seconds: float) -> Rate:
    """Measure for about so many seconds, in passes of which the first is the longest.

    Raises:
        Exception: What the dataset raises, or what starting a worker does.
    """
    begin = time.perf_counter()
    made = rebuilt(loader, workers)
    made.until = begin + 0.6 * seconds
    rates: list[float] = []
    starts: list[float] = []
    batches = 0
    size = 0.0
    for number in range(_PASSES):
        started = time.perf_counter()
        times = [started]
        for batch in made:
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
        made.until = now + 0.25 * seconds
    made._iterator = None  # ends workers that stayed
    if not batches:
        raise ValueError("the loader gave no batch at all")
    size = made.sizes[0] / made.sizes[1] if made.sizes[1] else size
    a_second = statistics.median(rates)
    return Rate(
        workers=workers,
        batches=batches,
        samples_per_s=a_second * size,
        batches_per_s=a_second,
        low=min(rates) * size,
        high=max(rates) * size,
        windows=len(rates),
        first_batch=starts[0],
        epoch_start=statistics.median(starts[1:]) if len(starts) > 1 else None,
    )


def _rates(times: list[float], workers: int) -> list[float]:
    """Batches per second in windows of a pass; neither its first batches nor its last, when workers run dry."""
    turn = max(1, workers)  # batches come in turns of one a worker
    first, last = turn, len(times) - 1 - (turn if workers else 0)
    turns = (last - first) // turn
    if turns < 1:  # a short pass: all of it, without the wait for the first batch if there are more
        first, last = (1, len(times) - 1) if len(times) > 2 else (0, 1)
        return [(last - first) / max(1e-9, times[last] - times[first])]
    length = max(1, turns // _WINDOWS) * turn
    edges = range(first, last + 1, length)
    return [length / max(1e-9, times[end] - times[start]) for start, end in pairwise(edges)]


def _samples(loader: Any, batch: Any) -> float:
    """Return how many samples are in a batch."""
    from torch.utils._pytree import tree_iter

    if isinstance(loader.batch_size, int):
        return float(loader.batch_size)
    shapes = (tuple(part.shape) for part in tree_iter(batch) if hasattr(part, "shape"))
    return float(next((shape[0] for shape in shapes if shape), 1))


def rebuilt(loader: Any, workers: int, init: Any = None) -> RebuiltLoader:
    """The same loader with another number of workers, which stay from pass to pass."""
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
    """A DataLoader whose passes end, by their sampler, when it is time.

    Attributes:
        until: When the pass is to end, on the monotonic clock; None: with the data.
        sizes: Samples that were asked for by index, and in how many batches.
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
    """A sampler that ends when it is time, after one batch at least."""

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
