"""Predict the exposed part of communication: DDP's buckets overlap with the backward, FSDP's units with both passes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

FIRST_BUCKET = 1 << 20
BUCKET = 25 << 20
"""Bytes of DistributedDataParallel's buckets: of the first, and of the others (`bucket_cap_mb`)."""
RUN_BUCKET = 1 << 25
"""Bytes per all-reduce under `hasten run --devices`."""


def buckets(sizes: Iterable[int], first: int, later: int) -> list[list[int]]:
    """Return the buckets, as lists of indices into `sizes`. A bucket ends with the gradient that fills it.

    Args:
        sizes: Bytes of the gradients, in the order they become ready.
        first: Bytes that fill the first bucket.
        later: Bytes that fill each of the others.
    """
    result: list[list[int]] = []
    bucket: list[int] = []
    filled = 0
    for index, size in enumerate(sizes):
        bucket.append(index)
        filled += size
        if filled >= (later if result else first):
            result.append(bucket)
            bucket, filled = [], 0
    return [*result, bucket] if bucket else result


def behind_backward(sizes: Sequence[float], seconds: Callable[[float], float], backward: float) -> float:
    """Return the seconds that the exchange of buckets lasts beyond the end of the backward.

    A bucket is sent once its gradients are ready and the bucket before has been exchanged (Li et al. 2020, PyTorch
    Distributed: Experiences on Accelerating Data Parallel Training). Gradients are assumed to become ready in
    proportion to their bytes.

    Args:
        sizes: Bytes of the buckets, in order.
        seconds: Function that returns the seconds to exchange a bucket of a given size.
        backward: Seconds of the backward.
    """
    total, ready_bytes, free = sum(sizes), 0.0, 0.0
    for size in sizes:
        ready_bytes += size
        ready = backward * ready_bytes / total
        free = max(ready, free) + seconds(size)
    return max(0.0, free - backward)


def unit_forward(units: int, forward: float, gather: float) -> float:
    """Return the seconds of a forward in equal units, each gathered while the unit before computes.

    As in FSDP (Zhao et al. 2023, PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel), the forward waits
    for the first gather, and for the time by which further gathers are longer than a unit's computation.

    Args:
        units: Number of units.
        forward: Seconds of the whole forward.
        gather: Seconds to gather one unit.
    """
    compute = forward / units
    return gather + (units - 1) * max(compute, gather) + compute


def unit_backward(units: int, backward: float, gather: float, reduce: float) -> float:
    """Return the seconds of a backward in equal units.

    While a unit computes, the next one is gathered and the gradients of the one before are reduced, one after the other
    on the same network. The first unit is the root, which has remained gathered.

    Args:
        units: Number of units.
        backward: Seconds of the whole backward.
        gather: Seconds to gather one unit.
        reduce: Seconds to reduce one unit's gradients; 0 while they are only accumulated.
    """
    compute = backward / units
    if units == 1:
        return compute + reduce
    return max(compute, gather) + (units - 2) * max(compute, gather + reduce) + max(compute, reduce) + reduce


def loads(numels: Iterable[int], ranks: int) -> list[int]:
    """Return the number of elements each rank owns if whole tensors are distributed, the largest first.

    Each goes to the rank with the fewest elements, as in `hasten.parallel.zero`. Tensors are not cut, so a single large
    one limits the gain.
    """
    owned = [(0, rank) for rank in range(ranks)]
    for numel in sorted(numels, reverse=True):
        least, rank = owned[0]
        heapq.heapreplace(owned, (least + numel, rank))
    return [load for load, _ in owned]
