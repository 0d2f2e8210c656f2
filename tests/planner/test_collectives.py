"""Times of collectives, by what must be true of them whatever the figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from hasten.planner.collectives import (
    ALGORITHMS,
    Network,
    all_gather,
    all_reduce,
    broadcast,
    reduce_scatter,
    ring_bytes,
)

COLLECTIVES = (all_reduce, all_gather, reduce_scatter, broadcast)
ranks = some.integers(1, 4096)
sizes = some.integers(0, 1 << 40)
networks = some.builds(Network, some.floats(1e6, 1e12), some.floats(0, 1e-2), some.sampled_from(ALGORITHMS))


@given(sizes, ranks, networks)
def test_more_bandwidth_less_latency_and_fewer_bytes_are_never_slower(size: int, many: int, network: Network) -> None:
    wider = Network(network.bandwidth * 2, network.latency, network.algorithm)
    quicker = Network(network.bandwidth, network.latency / 2, network.algorithm)
    for collective in COLLECTIVES:
        seconds = collective(size, many, network)
        assert seconds >= 0
        assert collective(size, many, wider) <= seconds
        assert collective(size, many, quicker) <= seconds
        assert collective(size // 2, many, network) <= seconds


@given(sizes, networks)
def test_one_device_sends_nothing(size: int, network: Network) -> None:
    assert ring_bytes(size, 1) == 0
    assert [collective(size, 1, network) for collective in COLLECTIVES] == [0.0] * 4


@given(some.integers(1, 1 << 40), some.integers(2, 4096), some.floats(1e6, 1e12))
def test_a_ring_without_latency_takes_the_bytes_that_each_sends(size: int, many: int, bandwidth: float) -> None:
    network = Network(bandwidth, 0.0, "ring")
    seconds = all_reduce(size, many, network)
    assert seconds * bandwidth == pytest.approx(2 * (many - 1) / many * size)
    # An all-reduce is a reduce-scatter and an all-gather.
    assert all_gather(size, many, network) + reduce_scatter(size, many, network) == pytest.approx(seconds)


@given(some.integers(1, 1 << 40), some.integers(2, 4096), some.floats(1e6, 1e12), some.floats(0, 1e-2))
def test_auto_is_the_faster_of_ring_and_tree(size: int, many: int, bandwidth: float, latency: float) -> None:
    auto, *both = (all_reduce(size, many, Network(bandwidth, latency, name)) for name in ALGORITHMS)
    assert auto == min(both)


def test_trees_are_for_short_messages_and_rings_for_long_ones() -> None:
    ring, tree = (Network(25e9, 10e-6, name) for name in ("ring", "tree"))
    assert all_reduce(1000, 64, tree) < all_reduce(1000, 64, ring) / 9
    assert all_reduce(1 << 30, 8, ring) < all_reduce(1 << 30, 8, tree)


def test_figures_that_were_computed_by_hand() -> None:
    network = Network(1e9, 1e-3, "ring")
    assert all_reduce(4_000_000, 4, network) == pytest.approx(6 * 1e-3 + 6e6 / 1e9)
    assert all_reduce(4_000_000, 4, Network(1e9, 1e-3, "tree")) == pytest.approx(4 * 1e-3 + 8e6 / 1e9)
    assert all_gather(4_000_000, 4, network) == pytest.approx(3e-3 + 3e6 / 1e9)
    assert broadcast(1000, 4, network) == pytest.approx(2 * (1e-3 + 1e-6))
