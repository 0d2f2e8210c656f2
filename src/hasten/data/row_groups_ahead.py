"""Prefetches the row groups that a pass will open next: their bytes from a server, or their arrays from a disk."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

from hasten.data.remote.files import PendingRead
from hasten.data.remote.pool import Pool


class ReadAhead:
    """A row group that another thread reads.

    Args:
        pool: Has the thread.
        read: Returns its arrays.
        size: Bytes that they take, about.
    """

    def __init__(self, pool: Pool, read: Callable[[], list[Any]], size: int) -> None:
        self.size = size
        self._future = pool.submit(read)

    def drop(self) -> None:
        """Do not read it, if that has not begun."""
        self._future.cancel()

    def is_begun(self) -> bool:
        """Return whether the thread is reading it."""
        return self._future.running()

    def arrays(self) -> list[Any] | None:
        """Wait for its arrays, and return them; None if reading has not begun: the caller is as quick."""
        if self._future.cancel():
            return None
        while not self._future.done():
            wait([self._future], 1.0)  # in short turns, to notice a Ctrl-C whose signal another thread received
        arrays: list[Any] = self._future.result()
        return arrays


class RowGroupPrefetch:
    """Prefetches the row groups that a pass will open next.

    Args:
        begin: Begins to read a row group, by its number.
        budget: Bytes to hold before they are needed.
    """

    def __init__(self, begin: Callable[[int], PendingRead | ReadAhead], budget: int) -> None:
        self._begin = begin
        self._budget = budget
        self._lock = threading.Lock()
        self._coming: dict[int, PendingRead | ReadAhead] = {}
        self._next: deque[int] = deque()

    def follow(self, groups: list[int]) -> None:
        """Begin a pass that opens these row groups in this order; nothing is read before the first `take`."""
        with self._lock:
            for coming in self._coming.values():
                coming.drop()
            self._coming.clear()
            self._next = deque(groups)

    def take(self, number: int, is_open: Callable[[int], bool]) -> PendingRead | ReadAhead | None:
        """Return what was begun for a row group that is needed now, if it was, and begin the next ones in the budget.

        Args:
            number: Number of the row group.
            is_open: Returns whether a row group is open already.
        """
        with self._lock:
            pending = self._coming.pop(number, None)
            size = sum(coming.size for coming in self._coming.values())
            while self._next and size < self._budget:
                later = self._next.popleft()
                if later == number or later in self._coming or is_open(later):
                    continue
                coming = self._coming[later] = self._begin(later)
                size += coming.size
        return pending
