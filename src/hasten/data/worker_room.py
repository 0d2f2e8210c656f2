"""Limits how many workers a pass may have by the cores, memory and /dev/shm of this machine or container."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import psutil

from hasten.data.sample_fetcher import shm_free
from hasten.evidence.machine import memory_free, memory_limit, usable_cores

_LEAST = 16 << 20  # bytes assumed for a forked worker, at least
_SPARE, _MOST_SPARE = 32, 1 << 30  # memory to leave free: 1/32 of the total, at most 1 GiB
_EVERY = 1.0  # seconds between checks of the free memory
_MEASURED = 10.0  # seconds between measurements of the workers, for which the kernel walks through all their pages
_IN_USE = 2  # batches that the training and its pin_memory thread hold


class WorkerRoom:
    """The room for one loader's workers, checked as a pass begins and while it runs.

    A worker's memory is its unique set size, measured in earlier passes; pages shared with the training do not count.
    Batches ready in /dev/shm count as memory too, as they do for the kernel. Ranks on one machine (LOCAL_WORLD_SIZE)
    begin their passes together, before any has workers, so each takes its share of the free memory.

    Args:
        workers: Planned number of workers, which is never exceeded.
        prefetch: Planned number of batches that each worker may hold ready.
    """

    def __init__(self, workers: int, prefetch: int) -> None:
        self._workers, self._prefetch = workers, prefetch
        self._batch = self._private = 0  # bytes of the largest batch seen, and of the largest worker last measured
        self._looked = self._measured = 0.0

    def counts(self) -> tuple[int, int, str]:
        """Return the workers and batches ahead for a new pass, and why they are fewer than planned, or ""."""
        workers, prefetch, reasons = self._workers, self._prefetch, []
        if workers > 2 * (cores := usable_cores()):
            workers = 2 * cores
            reasons.append(f"this process may use {cores} cores")
        ranks = _ranks()
        among = f" for {ranks} ranks" if ranks > 1 else ""
        shm = shm_free()
        room = None if shm is None else shm // ranks
        if self._batch and room is not None and (workers * prefetch + _IN_USE) * self._batch > room:
            ready = max(0, room // self._batch - _IN_USE)
            workers = min(workers, ready)
            prefetch = min(prefetch, ready // max(1, workers)) or 1
            reasons.append(f"/dev/shm has {_mb(shm or 0)} free{among}, and a batch takes {_mb(self._batch)} of it")
        free, per_worker = memory_free(), max(_LEAST, self._private)
        if workers * (per_worker + prefetch * self._batch) > (room := max(0, free - _spare()) // ranks):
            # as many as one worker has room for
            prefetch = min(prefetch, max(1, (room - per_worker) // max(1, self._batch)))
            each = per_worker + prefetch * self._batch
            workers = min(workers, room // each)
            reasons.append(f"{_mb(free)} of memory are free{among}, and a worker takes {_mb(each)}")
        self._looked = time.monotonic()
        return workers, prefetch, "; ".join(reasons)

    def holds(self, batch: int) -> None:
        """Record the size of a batch in /dev/shm (bytes)."""
        self._batch = max(self._batch, batch)

    def short(self, workers: Iterable[int]) -> str:
        """Return, in words, that memory runs out and fewer workers would help; "" if not. Checks once a second.

        Args:
            workers: Process ids.
        """
        now = time.monotonic()
        if now - self._looked < _EVERY:
            return ""
        self._looked = now
        free = memory_free()
        if free >= _spare() // 2:
            return ""
        held = self.measure(workers, at_once=True)
        return f"{_mb(free)} of memory are free, and workers take {_mb(held)}" if held > free // 4 else ""

    def measure(self, workers: Iterable[int], at_once: bool = False) -> int:
        """Record the unique set size of the largest worker; return the sum over all (bytes; 0 if not measured now).

        Args:
            workers: Process ids.
            at_once: Measure even if the last measurement is recent.
        """
        if not at_once and self._private and time.monotonic() - self._measured < _MEASURED:
            return 0
        self._measured = time.monotonic()
        sizes = [_unique(pid) for pid in workers]
        self._private = max(sizes, default=0) or self._private  # keep the last size if all workers have ended
        return sum(sizes)


def _ranks() -> int:
    """Return how many ranks share this machine, from the LOCAL_WORLD_SIZE that torchrun and others set."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() else 1


def _unique(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:  # the worker has ended
        return 0


def _spare() -> int:
    return min(memory_limit() // _SPARE, _MOST_SPARE)


def _mb(size: int) -> str:
    return f"{size / 2**20:,.0f} MB" if size >= 10 << 20 else f"{size / 2**20:.1f} MB"
