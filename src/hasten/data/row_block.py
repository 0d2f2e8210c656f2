"""Rows of several batches that a dataset reads at once.

Reading 256 rows of 16 open row groups costs 16 times what NumPy takes for a call, whatever is copied: for a row of 128
bytes ten times the copying. So the rows of neighbouring batches are copied together, and a batch is a part of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from hasten.data.permutation import Indices
from hasten.data.remote.options import RemoteError


class RowBlock:
    """The rows of batches that follow each other in a pass.

    Args:
        indices: Their rows, in the order of the batches.
        batches: How many batches these are.
    """

    def __init__(self, indices: Indices, batches: int) -> None:
        self.batches = batches
        self._indices = indices
        self._lock = threading.Lock()
        self._rows: dict[str, torch.Tensor] | None = None
        self._fails = False

    def rows_of(self, begin: int, count: int) -> Indices:
        """Return the rows of a batch that begins here."""
        return self._indices[begin : begin + count]

    def part(self, begin: int, indices: list[int], gather: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Return the rows of a batch.

        Args:
            begin: Where the batch begins in the block.
            indices: Its rows.
            gather: Returns a new batch of the rows that it is given.
        """
        with self._lock:
            if self._rows is None and not self._fails:
                try:
                    self._rows = gather(self._indices)
                except RemoteError:  # the server is down: the next batch may ask again
                    raise
                except Exception:  # raised below again, by those batches alone that have the rows at fault
                    self._fails = True
        if self._rows is None:
            return gather(indices)
        # Copies, so that who keeps a batch does not keep the whole block. NumPy's: for large tensors torch starts all
        # threads of the training, which wait for each other while other batches are read.
        end = begin + len(indices)
        return {name: torch.from_numpy(rows.numpy()[begin:end].copy()) for name, rows in self._rows.items()}
