"""Keeps the rows of a small data set in memory, so that only its first epoch reads the files."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hasten.data.parquet_files import LocalFile
from hasten.data.permutation import Indices

_CHECK = 1.0  # seconds between looks at the files


class RowsInMemory:
    """One array per part of a batch, for the rows of all row groups.

    Args:
        files: The files, which are looked at from time to time: what is in memory is not read again, which would tell
            that a file was changed.
        parts: The handlers of the columns; each makes one array of a row group.
        sizes: Rows of each row group.
    """

    def __init__(self, files: Sequence[LocalFile], parts: list[Any], sizes: Indices) -> None:
        self.is_complete = False
        self._files = files
        self._parts = parts
        self._sizes = sizes.tolist()
        self._ends = np.cumsum(sizes).tolist()
        self._arrays: list[Any] = []
        self._missing = set(range(len(sizes)))
        self._lock = threading.Lock()
        self._checked_at = 0.0

    def holds(self, number: int) -> bool:
        """Return whether a row group was loaded."""
        return number not in self._missing

    def part(self, number: int) -> list[Any]:
        """Return a row group's part of each array."""
        end = self._ends[number]
        return [whole[end - self._sizes[number] : end] for whole in self._arrays]

    def load(self, number: int, table: Any, where: str) -> list[Any]:
        """Load a row group's columns, and return its part of each array.

        Args:
            number: Number of the row group.
            table: Its columns.
            where: Its name, for messages.
        """
        with self._lock:
            if not self._arrays:  # only an array that was loaded tells shape and type
                loaded = [part.load(table, where) for part in self._parts]
                self._arrays = [np.empty((self._ends[-1], *one.shape[1:]), one.dtype) for one in loaded]
        arrays = self.part(number)
        for part, array in zip(self._parts, arrays, strict=True):
            part.load(table, where, array)
        with self._lock:
            self._missing.discard(number)
            self.is_complete = not self._missing
        return arrays

    def gather(self, rows: Indices) -> dict[str, Any]:
        """Return a batch of these rows, in their order."""
        places = [np.arange(len(rows))]
        batch: dict[str, Any] = {}
        for part, array in zip(self._parts, self._arrays, strict=True):
            batch.update(part.gather([(array, rows)], places))
        return batch

    def check_files(self, begins: bool = False) -> None:
        """Look at the files once a second, and when a pass begins.

        Raises:
            HastenError: One was changed or removed.
        """
        now = time.monotonic()
        if begins or now - self._checked_at > _CHECK:
            for file in self._files:
                file.check_unchanged()
            self._checked_at = now
