"""Memoize results in files that other processes and later runs can use while their inputs are unchanged."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from time import perf_counter
from typing import Any

from hasten.data.disk_store import DiskStore
from hasten.data.fingerprint import Unnamed, fingerprint
from hasten.data.library_state import settings_of_libraries
from hasten.data.snapshot import ambient, flushes_denormals
from hasten.techniques.data import memoized as memory
from hasten.techniques.data.memoized import Memoized

_EVERY = 0.05  # least seconds between two full comparisons
_SHARE = 50  # and at least this multiple of a comparison's own duration
_MOST_BYTES = 32 << 20  # of samples that wait for a comparison before they are written
_LOT = 20  # audit interval in a process's first pass, when samples may come from another run


class MemoizedOnDisk(Memoized):
    """Memo on disk, in a file named by the fingerprint of everything that samples are made of.

    A sample is written only after a full comparison has found that state unchanged since it was made. It outlives the
    process, so it must not depend on a change that a quick comparison has missed.

    Args:
        store: Storage of the samples.
        roots: Objects that the function depends on, by name; see `Snapshot`.
        give_up: Called with the reason when nothing is kept any more.
    """

    _replaces = True  # otherwise a rewritten input file would be read again in each epoch of all later runs

    def __init__(self, store: DiskStore, roots: dict[str, Any], give_up: Callable[[str], None]) -> None:
        self._files = store
        self._unnamed = ""
        self._pending: list[tuple[bytes, bytes]] = []
        self._pending_bytes, self.pid = 0, 0
        self._flushed, self._look_took = perf_counter(), 0.0
        super().__init__(store, roots, give_up)

    def _new_state(self) -> str:
        """Return the state's fingerprint, and open its file; "" if there can be none."""
        self._pending = []
        if super()._why_not():
            return ""
        try:
            name = fingerprint(self._snapshot, self._roots)
            self._files.open(name)
        except Unnamed as unnamed:
            self._unnamed = str(unnamed)
        except OSError as error:
            self._unnamed = f"samples cannot be kept in {self._files.folder.path}: {error.strerror or error}"
        except Exception as error:  # the script's own `__repr__` or property may raise anything
            self._unnamed = f"what samples are made of cannot be told in another process ({type(error).__name__})"
        else:
            return name
        return ""

    def _why_not(self) -> str:
        return super()._why_not() or self._unnamed

    def _one_in(self) -> int:
        return _LOT if self._hits <= self._files.samples else memory._LOT

    def _surroundings(self) -> tuple[Any, ...]:
        import torch

        # The number of threads decides how sums are rounded, and is 1 in workers. The state is in the file's name.
        return ambient(), flushes_denormals(), torch.get_num_threads(), settings_of_libraries()

    def _keep(self, key: Any, value: Any) -> None:
        if self.pid != os.getpid():  # after a fork, the waiting samples are the parent's
            self.pid, self._pending, self._pending_bytes = os.getpid(), [], 0
            # Flush when a worker or the training exits normally. A weak reference, so that the memo can be freed
            # before.
            Finalize(self, _flush_at_end, args=(weakref.ref(self),), exitpriority=10)
        entry = self._files.packed((*self._surroundings(), key), value)
        if entry is None:
            return
        self._pending.append(entry)
        self._pending_bytes += len(entry[1])
        waits = max(_EVERY, _SHARE * self._look_took)
        if perf_counter() - self._flushed >= waits or self._pending_bytes > _MOST_BYTES:
            self.flush()

    def files(self) -> DiskStore | None:
        """Return the store, which a copy in another process opens again; None if the memo was given up."""
        return None if self.is_over() else self._files

    def flush(self) -> None:
        """Write the waiting samples, if everything that they were made of is unchanged."""
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        start = perf_counter()
        changed = self._snapshot.changed_at_all()
        self._flushed = perf_counter()
        self._look_took = self._flushed - start
        if not changed and not self.is_over():
            for entry in pending:
                self._files.add(*entry)

    def __del__(self) -> None:
        if self._pending and self.pid == os.getpid() and not sys.is_finalizing():
            self.flush()


def _flush_at_end(waiting: weakref.ref[MemoizedOnDisk]) -> None:
    kept = waiting()
    if kept is not None and kept.pid == os.getpid():
        kept.flush()
