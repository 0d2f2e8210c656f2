"""Predict the time of collectives by the alpha-beta model: a message of n bytes takes latency + n / bandwidth.

Sources: Thakur, Rabenseifner, Gropp 2005, Optimization of Collective Communication Operations in MPICH (rings,
broadcast); Sanders, Speck, Träff 2009, Two-tree Algorithms for Full Bandwidth Broadcast, Reduction and Scan (trees, as
in NCCL). The time of the additions is not modeled: it is part of the measured bandwidth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ALGORITHMS = ("auto", "ring", "tree")


@dataclass(frozen=True)
class Network:
    """Network between devices: one value for all links, that of the slowest.

    Attributes:
        bandwidth: Bytes per second that each device can send to its neighbor while all do ("busbw" of nccl-tests).
        latency: Seconds that a message takes in addition.
        algorithm: Algorithm of all-reduce: "ring", "tree", or "auto": the faster of both for each message.
    """

    bandwidth: float
    latency: float
    algorithm: str = "auto"


def ring_bytes(size: float, ranks: int) -> float:
    """Return the bytes that each of N ranks sends in a ring all-reduce of `size` bytes: 2 (N - 1) / N times `size`."""
    return 2 * (ranks - 1) / ranks * size


def all_reduce(size: float, ranks: int, network: Network) -> float:
    """Return the seconds of an all-reduce of `size` bytes by the network's algorithm; 0 for one rank or no bytes."""
    if ranks == 1 or size <= 0:
        return 0.0
    seconds = {"ring": _ring(size, ranks, network), "tree": _tree(size, ranks, network)}
    return seconds.get(network.algorithm, min(seconds.values()))


def _ring(size: float, ranks: int, network: Network) -> float:
    """Return the seconds of a ring all-reduce: 2 (N - 1) messages of size / N each (Thakur et al.).

    They are a reduce-scatter and an all-gather around a ring.
    """
    return 2 * (ranks - 1) * network.latency + ring_bytes(size, ranks) / network.bandwidth


def _tree(size: float, ranks: int, network: Network) -> float:
    """Return the seconds of a two-tree all-reduce: few messages, but all bytes twice (Sanders et al.).

    They go up and down two binary trees, each with half of the bytes.
    """
    return 2 * math.ceil(math.log2(ranks)) * network.latency + 2 * size / network.bandwidth


def all_gather(size: float, ranks: int, network: Network) -> float:
    """Return the seconds of a ring all-gather, after which each rank has all `size` bytes."""
    if ranks == 1 or size <= 0:
        return 0.0
    return (ranks - 1) * network.latency + (ranks - 1) / ranks * size / network.bandwidth


def reduce_scatter(size: float, ranks: int, network: Network) -> float:
    """Return the seconds of a ring reduce-scatter, after which each rank has its part of the sum of `size` bytes."""
    return all_gather(size, ranks, network)  # the same messages in reverse order


def broadcast(size: float, ranks: int, network: Network) -> float:
    """Return the seconds of a broadcast of `size` bytes, by the faster of two algorithms (Thakur et al.).

    A binomial tree is faster for short messages, a scatter and all-gather for long ones.
    """
    if ranks == 1 or size <= 0:
        return 0.0
    rounds = math.ceil(math.log2(ranks))
    tree = rounds * (network.latency + size / network.bandwidth)
    scattered = (rounds + ranks - 1) * network.latency + ring_bytes(size, ranks) / network.bandwidth
    return min(tree, scattered)
