"""A pseudorandom permutation that is computed, not stored, from a few numbers.

Position p of an epoch is sample `Permutation(length, seed, epoch)(p)` on every rank and in every worker, so the state
of a shuffled pass is only how many samples were consumed. The same numbers give the same order with every version of
NumPy, because nothing is drawn from its generators.
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
# Up to this length, sort hashes and keep the order (512 KB). A Feistel network over few bits can give only a small part
# of all orders: with 4 bits, hardly any of the 16! orders.
_SORTED = 1 << 16
_BLOCK = 1 << 15  # positions permuted at once, so that the network's arrays stay in the CPU core's cache


def key_of(*numbers: int) -> int:
    """Return a 64-bit key of some numbers; their order matters."""
    key = _GOLDEN
    for number in numbers:
        key = _mix(key ^ _mix((number & _MASK) + _GOLDEN))
    return key


def keys_of(key: int, numbers: Indices) -> NDArray[np.uint64]:
    """Return, for each number, a 64-bit key of `key` and the number."""
    return _mixed(numbers.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(key))


def _mix(value: int) -> int:
    """Return the splitmix64 finalizer of a value: each input bit flips each output bit with probability 1/2."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply `_mix` to each value, in place."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(_FIRST)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_SECOND)
    values ^= values >> np.uint64(31)
    return values


class Permutation:
    """A permutation of the numbers below `length`, determined by the other numbers.

    Above 65,536, it is a Feistel network over the bits of `length`, applied again while the result is not below
    `length` (cycle walking): at most two steps on average, no memory, and random access to any position.

    Args:
        length: How many numbers.
        numbers: Determine the order, such as seed and epoch.
    """

    def __init__(self, length: int, *numbers: int) -> None:
        if length < 0:
            raise ValueError(f"a permutation of {length} numbers")
        self.length = length
        self._sorted: Indices | None = None
        if length <= _SORTED:
            hashes = keys_of(key_of(*numbers), np.arange(length, dtype=np.int64))
            self._sorted = np.argsort(hashes).astype(np.int64)  # no two hashes are equal, so no order among equals
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
        permuted = np.empty_like(flat)
        for start in range(0, flat.size, _BLOCK):
            permuted[start : start + _BLOCK] = self._walk(flat[start : start + _BLOCK].astype(np.uint64))
        return permuted.reshape(where.shape)

    def _walk(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Apply the network to each value until it is below `length`, which happens because it permutes in cycles."""
        values = self._network(values)
        outside = np.flatnonzero(values >= np.uint64(self.length))
        while outside.size:
            values[outside] = again = self._network(values[outside])
            outside = outside[again >= np.uint64(self.length)]
        return values

    def _network(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Apply the Feistel network, which permutes the numbers of that many bits: each half is XORed in turn."""
        low, high = values & self._low, values >> self._low_bits
        for number, key in enumerate(self._keys):
            if number % 2:
                high ^= _hashed(low, key) & self._high
            else:
                low ^= _hashed(high, key) & self._low
        return (high << self._low_bits) | low


def _hashed(half: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Return a hash of one half. The high bits of a product are mixed best, hence the final shift."""
    values = (half + key) * np.uint64(_FIRST)
    values ^= values >> np.uint64(32)
    values *= np.uint64(_SECOND)
    return values >> np.uint64(29)
