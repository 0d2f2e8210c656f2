"""Row groups fetched before they are asked for, in the order in which a pass comes to them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from hasten.data.remote.files import PendingRead


class RowGroupPrefetch:
    """Row groups that are being fetched.

    Args:
        begin: Has a row group fetched, by its number; returns None for one that lies on a local disk.
        budget: Bytes that may lie here before they are asked for.
    """

    def __init__(self, begin: Callable[[int], PendingRead | None], budget: int) -> None:
        self._begin = begin
        self._budget = budget
        self._lock = threading.Lock()
        self._coming: dict[int, PendingRead] = {}
        self._next: deque[int] = deque()

    def follow(self, groups: list[int]) -> None:
        """Begin a pass that comes to these row groups in this order. Nothing is fetched before the first `take`."""
        with self._lock:
            for coming in self._coming.values():
                coming.drop()
            self._coming.clear()
            self._next = deque(groups)

    def take(self, number: int, is_open: Callable[[int], bool]) -> PendingRead | None:
        """Return a row group that is needed now, on its way, and have those fetched that come next.

        Args:
            number: Of the row group.
            is_open: Whether a row group was asked for before, and is here.
        """
        with self._lock:
            taken = self._coming.pop(number, None) or self._begin(number)
            size = sum(coming.size for coming in self._coming.values())
            while self._next and size < self._budget:
                later = self._next.popleft()
                if later == number or later in self._coming or is_open(later):
                    continue
                coming = self._begin(later)
                if coming is not None:
                    self._coming[later] = coming
                    size += coming.size
        return taken
