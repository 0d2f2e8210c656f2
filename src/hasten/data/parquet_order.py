"""A shuffled order of rows that lie in row groups: well mixed, and a reader has only a few groups open at a time."""

from __future__ import annotations

from collections import OrderedDict

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
    """

    def __init__(self, sizes: Indices, lanes: int, seed: int, epoch: int) -> None:
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
        places = self._lane_starts[positions % self._lanes] + positions // self._lanes
        slots = np.searchsorted(self._ends, places, side="right")
        groups = self._groups[slots]
        offsets = places - (self._ends[slots] - self._sizes[groups])
        rows = np.empty_like(offsets)
        for group in np.unique(groups).tolist():
            here = groups == group
            rows[here] = self._order_in(group)(offsets[here]) + self._starts[group]
        return rows

    def _order_in(self, group: int) -> Permutation:
        order = self._inside.get(group)
        if order is None:
            order = self._inside[group] = Permutation(int(self._sizes[group]), *self._numbers, group)
            if len(self._inside) > 2 * self._lanes + 2:
                self._inside.popitem(last=False)
        return order
