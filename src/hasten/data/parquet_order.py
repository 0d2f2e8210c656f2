"""Orders over the rows of row groups: shuffled with only a few groups open at a time, or as in the files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from hasten.data.permutation import Indices, Permutation


def places_of(numbers: Indices) -> list[tuple[int, Indices]]:
    """Return each number that occurs, in ascending order, with the places where it does."""
    if not len(numbers):
        return []
    # NumPy sorts whole numbers of 16 bits by radix, eight times as fast.
    small = numbers.astype(np.uint16) if numbers.min() >= 0 and numbers.max() < 1 << 16 else numbers
    in_order = bool((small[1:] >= small[:-1]).all())  # of rows in file order
    order = np.arange(len(numbers)) if in_order else np.argsort(small, kind="stable")
    begins = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    return list(zip(numbers[order[begins]].tolist(), np.split(order, begins[1:]), strict=True))


class LaneOrder:
    """A shuffled order of (seed, epoch) that visits each row once, with neighbours from different row groups.

    Problem: a full shuffle would read a row group for almost every row. Approach: concatenate the groups in permuted
    order, with the rows permuted inside each group; cut that sequence into `lanes` equal parts; position p is the next
    row of lane p modulo `lanes`. So one group is open per lane at any moment, and if the number of ranks divides the
    number of lanes, no two ranks read the same lane (only a group cut by a lane's end is read by two).

    Args:
        sizes: Rows of each group.
        lanes: How many groups are open at a time.
        seed: Seed of the order.
        epoch: Epoch of the order.
        follow: Called once, at the first positions, with the groups in the order in which they will be opened.
    """

    def __init__(
        self, sizes: Indices, lanes: int, seed: int, epoch: int, follow: Callable[[list[int]], None] | None = None
    ) -> None:
        self._follow = follow
        self._numbers = (seed, epoch)
        self._sizes = sizes
        self._starts = np.concatenate([[0], np.cumsum(sizes)])[:-1]
        self._groups = Permutation(len(sizes), seed, epoch, len(sizes))(np.arange(len(sizes)))
        self._ends = np.cumsum(sizes[self._groups])
        total = int(sizes.sum())
        self._lanes = max(1, min(lanes, total))
        lane = np.arange(self._lanes)
        self._lane_starts = lane * (total // self._lanes) + np.minimum(lane, total % self._lanes)
        self._inside: OrderedDict[int, Permutation] = OrderedDict()

    def __call__(self, positions: Indices) -> Indices:
        """Return the rows at these positions."""
        if self._follow is not None and len(positions):
            self._follow(self.opened(positions))
            self._follow = None
        places = self._lane_starts[positions % self._lanes] + positions // self._lanes
        slots = np.searchsorted(self._ends, places, side="right")
        groups = self._groups[slots]
        offsets = places - (self._ends[slots] - self._sizes[groups])
        rows = np.empty_like(offsets)
        for group, here in places_of(groups):
            rows[here] = self._order_in(group)(offsets[here]) + self._starts[group]
        return rows

    def opened(self, positions: Indices) -> list[int]:
        """Return the groups that a reader opens when it goes on from these positions, in that order.

        Args:
            positions: The first positions of a pass. They show which lanes this rank reads: a rank that takes every
                second position, with an even number of lanes, never reads every second lane.
        """
        first = int(positions[0])
        openings: list[tuple[int, int]] = []
        for lane in np.unique(positions % self._lanes).tolist():
            begin = int(self._lane_starts[lane])
            end = int(self._lane_starts[lane + 1]) if lane + 1 < self._lanes else int(self._ends[-1])
            rows_done = max(0, -(-(first - lane) // self._lanes))  # rows of this lane before the first position
            slot = int(np.searchsorted(self._ends, begin + rows_done, side="right"))
            while slot < len(self._groups):
                group = int(self._groups[slot])
                place = max(int(self._ends[slot] - self._sizes[group]), begin + rows_done)
                if place >= end:
                    break
                openings.append(((place - begin) * self._lanes + lane, group))
                slot += 1
        return [group for _, group in sorted(openings)]

    def _order_in(self, group: int) -> Permutation:
        """Return the permutation of a group's rows, cached while the group may be open."""
        order = self._inside.get(group)
        if order is None:
            order = self._inside[group] = Permutation(int(self._sizes[group]), *self._numbers, group)
            if len(self._inside) > 2 * self._lanes + 2:
                self._inside.popitem(last=False)
        return order


class FileOrder:
    """The rows in file order.

    Args:
        sizes: Rows of each group.
        follow: Called once, at the first positions, with the groups in the order in which they will be opened.
    """

    def __init__(self, sizes: Indices, follow: Callable[[list[int]], None]) -> None:
        self._ends = np.cumsum(sizes)
        self._follow: Callable[[list[int]], None] | None = follow

    def __call__(self, positions: Indices) -> Indices:
        """Return the rows at these positions, which are the same numbers."""
        if self._follow is not None and len(positions):
            first = int(np.searchsorted(self._ends, int(positions[0]), side="right"))
            self._follow(list(range(first, len(self._ends))))
            self._follow = None
        return positions
