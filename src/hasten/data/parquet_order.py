"""A shuffled order of rows that lie in row groups: well mixed, and a reader has only a few groups open at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from hasten.data.permutation import Indices, Permutation


class LaneOrder:
    """Each row once, in an order of (seed, epoch) in which neighbours come from different row groups.

    The groups are put in a row in permuted order, and their rows permuted inside them. That row is cut into `lanes`
    equal parts, of which position p reads lane p modulo lanes. So at any moment one group is open in each lane, and
    where the number of ranks divides that of lanes, each rank reads lanes, and so groups, of its own.

    Args:
        sizes: Rows of each group.
        lanes: How many groups are open at a time.
        seed: Of the order.
        epoch: Of the order.
        follow: Told the groups in the order in which they are opened, when the first positions are asked for.
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
        for group in np.unique(groups).tolist():
            here = groups == group
            rows[here] = self._order_in(group)(offsets[here]) + self._starts[group]
        return rows

    def opened(self, positions: Indices) -> list[int]:
        """Return the groups that are opened by who reads on from these positions, in that order.

        Args:
            positions: The first ones of a pass. A rank that takes every second one never comes to every second lane.
        """
        first = int(positions[0])
        found: list[tuple[int, int]] = []
        for lane in np.unique(positions % self._lanes).tolist():
            begin = int(self._lane_starts[lane])
            end = int(self._lane_starts[lane + 1]) if lane + 1 < self._lanes else int(self._ends[-1])
            done = max(0, -(-(first - lane) // self._lanes))  # rows of this lane that lie before the first position
            slot = int(np.searchsorted(self._ends, begin + done, side="right"))
            while slot < len(self._groups):
                group = int(self._groups[slot])
                place = max(int(self._ends[slot] - self._sizes[group]), begin + done)
                if place >= end:
                    break
                found.append(((place - begin) * self._lanes + lane, group))
                slot += 1
        return [group for _, group in sorted(found)]

    def _order_in(self, group: int) -> Permutation:
        order = self._inside.get(group)
        if order is None:
            order = self._inside[group] = Permutation(int(self._sizes[group]), *self._numbers, group)
            if len(self._inside) > 2 * self._lanes + 2:
                self._inside.popitem(last=False)
        return order


class FileOrder:
    """Rows as they lie in the files.

    Args:
        sizes: Rows of each group.
        follow: Told the groups in the order in which they are opened, when the first positions are asked for.
    """

    def __init__(self, sizes: Indices, follow: Callable[[list[int]], None]) -> None:
        self._ends = np.cumsum(sizes)
        self._follow: Callable[[list[int]], None] | None = follow

    def __call__(self, positions: Indices) -> Indices:
        """Return the rows at these positions: the same numbers."""
        if self._follow is not None and len(positions):
            first = int(np.searchsorted(self._ends, int(positions[0]), side="right"))
            self._follow(list(range(first, len(self._ends))))
            self._follow = None
        return positions
