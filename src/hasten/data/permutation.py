"""Orders of a data set that are computed, not stored: a permutation named by a few numbers.

Position p of an epoch is sample `Permutation(length, seed, epoch)(p)`, on every rank and in every worker, so the state
of a shuffled pass is how many samples are over. The same numbers give the same order with every version of NumPy:
nothing is drawn from its generators.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROUNDS = 6
# Up to here an order is a sort of hashes: as random as the hash is, and kept (512 KB). A Feistel network over a few
# bits has few orders to give: over 4 bits, hardly any of the 16! there are.
_SORTED = 1 << 16
_BLOCK = 1 << 15  # positions permuted at once: what a network works on stays in the core's cache


def key_of(*numbers: int) -> int:
    """Return a 64-bit key of some numbers; another order of them is another key."""
    key = _GOLDEN
    for number in numbers:
        key = _mix(key ^ _mix((number & _MASK) + _GOLDEN))
    return key


def keys_of(key: int, numbers: Indices) -> NDArray[np.uint64]:
    """Return a 64-bit key for each number: of `key` and the number."""
    return _mixed(numbers.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(key))


def _mix(value: int) -> int:
    """The finalizer of splitmix64: each bit of the value changes each bit of what comes out half of the time."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_mix` of each value; the array is changed."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(_FIRST)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_SECOND)
    values ^= values >> np.uint64(31)
    return values


class Permutation:
    """Every number below `length` once, in an order that the other numbers name.

    Above 65,536, a Feistel network over the bits of `length`, walked on while it leads outside: at most two steps on
    average, no memory, and any position is found without those before it.

    Args:
        length: How many numbers.
        numbers: What names the order, such as seed and epoch.
    """

    def __init__(self, length: int, *numbers: int) -> None:
        if length < 0:
            raise ValueError(f"a permutation of {length} numbers")
        self.length = length
        self._sorted: Indices | None = None
        if length <= _SORTED:
            hashes = keys_of(key_of(*numbers), np.arange(length, dtype=np.int64))
            self._sorted = np.argsort(hashes, kind="stable").astype(np.int64)
            return
        bits = (length - 1).bit_length()
        self._low_bits = np.uint64(bits // 2)
        self._low = np.uint64((1 << (bits // 2)) - 1)
        self._high = np.uint64((1 << (bits - bits // 2)) - 1)
        self._keys = [np.uint64(key_of(*numbers, number)) for number in range(_ROUNDS)]

    def __len__(self) -> int:
        return self.length

    def __call__(self, positions: Any) -> Indices:
        """Return the numbers at these positions.

        Args:
            positions: An array or sequence of whole numbers, each at least 0 and below `length`.
        """
        where = np.asarray(positions, dtype=np.int64)
        if where.size and (int(where.min()) < 0 or int(where.max()) >= self.length):
            raise IndexError(f"positions must be at least 0 and below {self.length}")
        if self._sorted is not None:
            return self._sorted[where]
        flat = where.ravel()
        found = np.empty_like(flat)
        for start in range(0, flat.size, _BLOCK):
            found[start : start + _BLOCK] = self._walk(flat[start : start + _BLOCK].astype(np.uint64))
        return found.reshape(where.shape)

    def _walk(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Go on from each value until it is below `length`: the network's cycle leads back inside."""
        values = self._network(values)
        outside = np.flatnonzero(values >= np.uint64(self.length))
        while outside.size:
            values[outside] = again = self._network(values[outside])
            outside = outside[again >= np.uint64(self.length)]
        return values

    def _network(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Permute the numbers of so many bits: the halves change each other in turn."""
        low, high = values & self._low, values >> self._low_bits
        for number, key in enumerate(self._keys):
            if number % 2:
                high ^= _hashed(low, key) & self._high
            else:
                low ^= _hashed(high, key) & self._low
        return (high << self._low_bits) | low


def _hashed(half: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """A hash of one half. The best bits of a product are its upper ones, hence the shift."""
    values = (half + key) * np.uint64(_FIRST)
    values ^= values >> np.uint64(32)
    values *= np.uint64(_SECOND)
    return values >> np.uint64(29)
