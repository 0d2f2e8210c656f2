"""How long collectives take, by the alpha-beta model: a message of n bytes takes latency + n / bandwidth.

Sources: Thakur, Rabenseifner, Gropp 2005, Optimization of Collective Communication Operations in MPICH (rings,
broadcast); Sanders, Speck, Träff 2009, Two-tree Algorithms for Full Bandwidth Broadcast, Reduction and Scan (trees, as
NCCL has them). The time of the additions is left out: it is part of the bandwidth that is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ALGORITHMS = ("auto", "ring", "tree")


@dataclass(frozen=True)
class Network:
    """The network between devices: one figure for all links, the slowest one's.

    Attributes:
        bandwidth: Bytes per second that each device can send to its neighbor while all do ("busbw" of nccl-tests).
        latency: Seconds that a message takes beside that.
        algorithm: Of all-reduce: "ring", "tree", or "auto": the faster of both for each message.
    """

    bandwidth: float
    latency: float
    algorithm: str = "auto"


def ring_bytes(size: float, ranks: int) -> float:
    """Return the bytes that each rank sends in an all-reduce of `size` bytes: 2 (N - 1) / N times its size."""
    return 2 * (ranks - 1) / ranks * size


def all_reduce(size: float, ranks: int, network: Network) -> float:
    """Return the seconds of an all-reduce of `size` bytes by the network's algorithm; 0 for one rank or no bytes."""
    if ranks == 1 or size <= 0:
        return 0.0
    both = {"ring": _ring(size, ranks, network), "tree": _tree(size, ranks, network)}
    return both.get(network.algorithm, min(both.values()))


def _ring(size: float, ranks: int, network: Network) -> float:
    """A reduce-scatter and an all-gather around a ring: 2 (N - 1) messages of size / N each (Thakur et al.)."""
    return 2 * (ranks - 1) * network.latency + ring_bytes(size, ranks) / network.bandwidth


def _tree(size: float, ranks: int, network: Network) -> float:
    """Up and down two binary trees, each with half of the bytes: few messages, all bytes twice (Sanders et al.)."""
    return 2 * math.ceil(math.log2(ranks)) * network.latency + 2 * size / network.bandwidth


def all_gather(size: float, ranks: int, network: Network) -> float:
    """Return the seconds after which each rank has all of `size` bytes, of which each had a part; a ring."""
    if ranks == 1 or size <= 0:
        return 0.0
    return (ranks - 1) * network.latency + (ranks - 1) / ranks * size / network.bandwidth


def reduce_scatter(size: float, ranks: int, network: Network) -> float:
    """Return the seconds after which each rank has its part of the sum of all ranks' `size` bytes; a ring."""
    return all_gather(size, ranks, network)  # the same messages, the other way round


def broadcast(size: float, ranks: int, network: Network) -> float:
    """Return the seconds after which all ranks have one's `size` bytes: a binomial tree, or a scatter and all-gather.

    The faster of both (Thakur et al.): the tree for short messages, the other for long ones.
    """
    if ranks == 1 or size <= 0:
        return 0.0
    rounds = math.ceil(math.log2(ranks))
    tree = rounds * (network.latency + size / network.bandwidth)
    scattered = (rounds + ranks - 1) * network.latency + ring_bytes(size, ranks) / network.bandwidth
    return min(tree, scattered)
