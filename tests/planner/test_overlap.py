"""What a step waits for: against torch's own buckets and hasten's own shares, and by what must be true."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as some

from hasten.parallel import World
from hasten.parallel.zero import ShardedStates
from hasten.planner.overlap import (
    BUCKET,
    FIRST_BUCKET,
    behind_backward,
    buckets,
    loads,
    unit_backward,
    unit_forward,
)

seconds = some.floats(0, 10)


@given(some.lists(some.integers(1, 3 << 20), min_size=1, max_size=40))
def test_buckets_are_those_of_torch(numels: list[int]) -> None:
    tensors = [torch.empty(numel, device="meta") for numel in numels]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [FIRST_BUCKET, BUCKET])
    assert buckets([4 * numel for numel in numels], FIRST_BUCKET, BUCKET) == theirs


@given(some.lists(some.integers(1, 2000), min_size=1, max_size=12), some.integers(2, 5))
def test_shares_are_those_of_the_sharded_optimizer(numels: list[int], ranks: int) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(numel)) for numel in numels]
    optimizer = torch.optim.SGD(parameters)
    owner = ShardedStates(optimizer, World(size=ranks)).owner
    theirs = [sum(n for n, rank in zip(numels, owner, strict=True) if rank == one) for one in range(ranks)]
    assert sorted(loads(numels, ranks)) == sorted(theirs)


@given(some.lists(some.floats(1, 1e9), min_size=1, max_size=20), some.floats(1e6, 1e12), seconds)
def test_a_step_waits_for_the_last_bucket_at_least_and_for_all_at_most(
    sizes: list[float], bandwidth: float, backward: float
) -> None:
    times = [size / bandwidth for size in sizes]
    waits = behind_backward(sizes, lambda size: size / bandwidth, backward)
    assert times[-1] <= waits * (1 + 1e-9) + 1e-9  # the last one can only begin when the backward is over
    assert waits <= sum(times) * (1 + 1e-9) + 1e-9
    assert behind_backward(sizes, lambda size: size / bandwidth, 0.0) == pytest.approx(sum(times))


@given(some.integers(1, 100), seconds, seconds, seconds)
def test_units_wait_never_less_than_nothing_nor_more_than_all(
    units: int, compute: float, gather: float, reduce: float
) -> None:
    near = 1e-9 + 1e-9 * (compute + units * (gather + reduce))
    forward = unit_forward(units, compute, gather)
    assert max(compute, units * gather) - near <= forward <= compute + units * gather + near
    backward = unit_backward(units, compute, gather, reduce)
    most = compute + (units - 1) * gather + units * reduce
    assert max(compute, (units - 1) * gather + units * reduce) - near <= backward <= most + near


def test_a_short_network_hides_behind_a_long_backward() -> None:
    assert behind_backward([10, 10], lambda size: 0.1, 100.0) == pytest.approx(0.1)
    assert unit_backward(10, 100.0, 1.0, 1.0) == pytest.approx(101.0)
    assert unit_forward(10, 100.0, 1.0) == pytest.approx(101.0)
