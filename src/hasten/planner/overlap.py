"""How much of an exchange the step waits for: buckets beside the backward, units beside forward and backward."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

FIRST_BUCKET = 1 << 20
BUCKET = 25 << 20
"""Bytes of DistributedDataParallel's buckets: the first, and the others (`bucket_cap_mb`)."""
RUN_BUCKET = 1 << 25
"""Bytes that `hasten run --devices` sends in one piece."""


def buckets(sizes: Iterable[int], first: int, others: int) -> list[list[int]]:
    """Return which gradients travel together, by their places in `sizes`: a bucket ends with what fills it.

    Args:
        sizes: Bytes of the gradients in the order in which they become ready.
        first: Bytes that fill the first bucket.
        others: Bytes that fill each of the others.
    """
    result: list[list[int]] = []
    bucket: list[int] = []
    held = 0
    for place, size in enumerate(sizes):
        bucket.append(place)
        held += size
        if held >= (others if result else first):
            result.append(bucket)
            bucket, held = [], 0
    return [*result, bucket] if bucket else result


def behind_backward(sizes: Sequence[float], seconds: Callable[[float], float], backward: float) -> float:
    """Return the seconds that buckets still travel when the backward is over.

    A bucket may go when its gradients are ready, and goes when the one before has arrived (Li et al. 2020, PyTorch
    Distributed: Experiences on Accelerating Data Parallel Training). Gradients become ready in proportion to their
    bytes.

    Args:
        sizes: Bytes of the buckets, in their order.
        seconds: How long a bucket of so many bytes travels.
        backward: Seconds of the backward.
    """
    total, done, free = sum(sizes), 0.0, 0.0
    for size in sizes:
        done += size
        ready = backward * done / total
        free = max(ready, free) + seconds(size)
    return max(0.0, free - backward)


def unit_forward(units: int, forward: float, gather: float) -> float:
    """Return the seconds of a forward in equal units, each gathered while the one before it computes.

    As FSDP does (Zhao et al. 2023, PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel): only the first
    gather, and what is longer than a unit's computing, is waited for.

    Args:
        units: How many.
        forward: Seconds of the whole forward.
        gather: Seconds in which one unit is gathered.
    """
    own = forward / units
    return gather + (units - 1) * max(own, gather) + own


def unit_backward(units: int, backward: float, gather: float, reduce: float) -> float:
    """Return the seconds of a backward in equal units: the next one is gathered, the last one's gradients are reduced.

    Both use the same network, one after the other. The first unit is the root, which has stayed whole.

    Args:
        units: How many.
        backward: Seconds of the whole backward.
        gather: Seconds in which one unit is gathered.
        reduce: Seconds in which its gradients are; 0 while they are only accumulated.
    """
    own = backward / units
    if units == 1:
        return own + reduce
    return max(own, gather) + (units - 2) * max(own, gather + reduce) + max(own, reduce) + reduce


def loads(numels: Iterable[int], ranks: int) -> list[int]:
    """Return how many numbers each rank owns where whole tensors are shared out: the largest first, to who has least.

    As `hasten.parallel.zero` does; a tensor is not cut, so one that is large bounds what sharing brings.
    """
    owned = [(0, rank) for rank in range(ranks)]
    for numel in sorted(numels, reverse=True):
        least, rank = owned[0]
        heapq.heapreplace(owned, (least + numel, rank))
    return [load for load, _ in owned]
