"""Iterators over a hasten DataLoader: in this process, or with torch's worker processes under watch.

They subclass torch's iterators, so tools that hook those (hasten's taps, profilers) see them too. Each worker writes
which sample it makes, and since when, into a row of shared memory (its beat), so the main process can say what a
dead or hung worker was doing. Attributes added to torch's classes begin with `_hasten_`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from hasten.child import die_with_parent
from hasten.data.first_batches import Packed, SplitIndices, in_memory_order, splits
from hasten.data.sample_fetcher import (
    COLLATING,
    IDLE,
    Collate,
    FetchedBatch,
    SampleError,
    SampleFetcher,
    shared_bytes,
    shm_free,
    shm_text,
)
from hasten.data.sample_keys import unmoved
from hasten.data.worker_deaths import DeferredWorkerDeath
from hasten.messages import warn

HUNG = 4.0  # seconds in one sample after which the training warns about the worker it waits for
_CHECK = 1.0  # seconds between checks of the worker whose batch is due
_FIELDS = 4  # a worker's beat: sample index, its start (ns), batch number, pid once it can print its stack


class CountedPass:
    """A mixin before torch's iterator class that counts yielded batches, for the loader's state."""

    _hasten_ledger: Any
    _hasten_place: Any

    def _hasten_count(self, loader: Any) -> None:
        self._hasten_ledger = loader.ledger
        self._hasten_place = loader.sampler.place

    def _hasten_made(self) -> Any:
        """Return the next batch."""
        raise NotImplementedError

    def _next_data(self) -> Any:
        place = self._hasten_place
        try:
            batch = self._hasten_made()
        except StopIteration:
            place.over = True
            self._hasten_ledger.tell()
            raise
        if type(batch) is FetchedBatch:
            self._hasten_ledger.note(batch.faults)
            batch = batch.batch
        place.batches += 1
        place.over = False  # tune may end a pass early and continue it with another iterator
        return batch


class InProcess(CountedPass, _SingleProcessDataLoaderIter):
    """An iterator that makes batches in the training's own process, on demand."""

    def __init__(self, loader: Any) -> None:
        self._hasten_count(loader)
        source = SampleFetcher(loader.dataset, loader.collate_fn, loader.on_error, shared=True)
        self._hasten_draws = source.reseed is not None
        with loader.lent(dataset=source, collate_fn=Collate(loader.collate_fn, source, shares=False)):
            super().__init__(loader)

    def _hasten_made(self) -> Any:
        if not self._hasten_draws:
            return _SingleProcessDataLoaderIter._next_data(self)
        with unmoved():
            return _SingleProcessDataLoaderIter._next_data(self)


class WorkerInit:
    """A `worker_init_fn` that runs the user's, and lets the main process see what this worker does."""

    def __init__(self, then: Callable[[int], Any] | None, source: SampleFetcher, beats: Any, folder: str) -> None:
        self._then = then
        self._source = source
        self._beats = beats
        self._folder = folder
        # Linux sends the parent-death signal when the thread that forked the child ends, not its process. Only the
        # main thread is sure to live as long as the process.
        self._follows = threading.current_thread() is threading.main_thread()

    def __call__(self, worker: int) -> None:
        if self._follows:
            die_with_parent()
        # Keep the training's objects shared with this process: a garbage collection would write to each of their
        # headers, and so copy their pages (Megatron-Energon, PR 40). Freeze here, not before the fork, so that the
        # training itself collects as before.
        gc.freeze()
        beat = np.frombuffer(self._beats, np.int64).reshape(-1, _FIELDS)[worker]
        info: Any = get_worker_info()
        source = self._source if info is None else info.dataset
        source.watched(beat, worker)
        if info is not None:
            object.__setattr__(info, "dataset", source.dataset)  # a worker_init_fn expects the user's dataset here
        if self._then is not None:
            self._then(worker)
        if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
            file = (Path(self._folder) / str(worker)).open("w")
            self._file = file
            faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
            beat[3] = os.getpid()


class WorkerProcesses(CountedPass, DeferredWorkerDeath, _MultiProcessingDataLoaderIter):
    """An iterator over worker processes that says what a killed or hung worker was making."""

    def __init__(self, loader: Any) -> None:
        self._hasten_count(loader)
        beats = multiprocessing.RawArray("q", _FIELDS * loader.num_workers)
        self._hasten_beats = np.frombuffer(beats, np.int64).reshape(-1, _FIELDS)
        self._hasten_beats[:, 0] = IDLE
        self._hasten_stacks = tempfile.mkdtemp(prefix="hasten-stacks-")
        weakref.finalize(self, shutil.rmtree, self._hasten_stacks, ignore_errors=True)
        self._hasten_free = shm_free()
        self._hasten_named: set[tuple[int, int, int]] = set()
        self._hasten_measured = False
        self._hasten_dataset = type(loader.dataset).__name__
        self._hasten_first = loader.num_workers if splits(loader) else 0
        self._hasten_collate = loader.collate_fn
        source = SampleFetcher(loader.dataset, loader.collate_fn, loader.on_error, shared=True)
        start = WorkerInit(loader.worker_init_fn, source, beats, self._hasten_stacks)
        collate = Collate(loader.collate_fn, source, shares=True)
        with loader.lent(dataset=source, collate_fn=collate, worker_init_fn=start):
            super().__init__(loader)
        self._hasten_forget()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._hasten_count(loader)
        self._hasten_cut = SplitIndices(self._hasten_first)
        self._hasten_over = 0  # parts still to come of a split batch that failed in another part
        super()._reset(loader, first_iter)

    def _next_index(self) -> Any:
        return self._hasten_cut.next(super()._next_index)

    def _hasten_made(self) -> Any:
        while self._hasten_over:
            self._hasten_over -= 1
            with contextlib.suppress(Exception):  # the batch's first error is raised already
                _MultiProcessingDataLoaderIter._next_data(self)
        count = self._hasten_cut.parts()
        if count == 1:
            return _MultiProcessingDataLoaderIter._next_data(self)
        parts: list[Packed] = []
        try:
            while len(parts) < count:
                parts.append(_MultiProcessingDataLoaderIter._next_data(self))
        except BaseException:
            self._hasten_over = count - len(parts) - 1
            raise
        return self._hasten_joined(parts)

    def _hasten_joined(self, parts: list[Packed]) -> Any:
        """Collate the parts of a split batch."""
        samples = [sample for part in parts for sample in part.samples()]
        faults = [fault for part in parts for fault in part.faults]
        if not samples:
            place = f"batch {self._hasten_place.batches} of epoch {self._hasten_place.epoch}"
            raise SampleError(f"all {len(faults)} samples of {place} failed: {faults[0].stack}")
        try:
            batch = in_memory_order(self._hasten_collate(samples))
        except Exception as error:
            error.add_note(f"hasten: while {len(samples)} samples of {self._hasten_dataset} were collated")
            raise
        if self._pin_memory:
            batch = pin_memory(batch)
        return FetchedBatch(batch, faults) if faults else batch

    def _next_data(self) -> Any:
        batch = super()._next_data()
        if not self._hasten_measured:
            self._hasten_measured = True
            self._hasten_room(batch)
        return batch

    def _try_get_data(self, timeout: float = 5.0) -> Any:
        """Wait for the next result of a worker, and check each second whether the awaited worker hangs."""
        until = time.monotonic() + timeout
        while True:
            try:
                got, data = super()._try_get_data(max(0.0, min(_CHECK, until - time.monotonic())))
            except RuntimeError as error:
                raise RuntimeError(self._hasten_why(error)) from error
            if got:
                return got, data
            worker = self._hasten_awaited()
            ends = time.monotonic() >= until
            if worker is not None and (self._timeout and ends):
                raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds: {self._hasten_stuck(worker)}")
            if worker is not None and self._hasten_seconds(worker) >= HUNG:
                self._hasten_name(worker)
            if ends:
                return False, None

    def _hasten_awaited(self) -> int | None:
        """Return the worker whose batch is due; None if the batch has arrived or is unknown."""
        info = self._task_info.get(self._rcvd_idx)
        return info[0] if info is not None and len(info) == 1 else None

    def _hasten_seconds(self, worker: int) -> float:
        """Return for how many seconds a worker has been making its sample (0: idle)."""
        index, since = self._hasten_beats[worker, :2].tolist()
        return 0.0 if index == IDLE else time.monotonic() - since / 1e9

    def _hasten_name(self, worker: int) -> None:
        """Warn about a hung worker, once for each sample."""
        index, since, _, _ = self._hasten_beats[worker].tolist()
        if (worker, index, since) not in self._hasten_named:
            self._hasten_named.add((worker, index, since))
            warn(f"the training waits: {self._hasten_stuck(worker)}", stacklevel=2)

    def _hasten_stuck(self, worker: int) -> str:
        return f"{self._hasten_doing(worker)}; its stack:\n{self._hasten_stack(worker)}"

    def _hasten_doing(self, worker: int) -> str:
        index, _, number, _ = self._hasten_beats[worker].tolist()
        name = f"worker {worker} (pid {self._workers[worker].pid})"
        if index == IDLE:
            return f"{name} is making no sample"
        seconds = f"for {self._hasten_seconds(worker):.1f} s"
        if index == COLLATING:
            return f"{name} has been collating batch {number} {seconds}"
        return f"{name} has been making sample {index} of {self._hasten_dataset}, of batch {number}, {seconds}"

    def _hasten_stack(self, worker: int) -> str:
        """Return the stacks of a worker's threads, which its faulthandler writes on SIGUSR2, even inside C code."""
        pid = self._workers[worker].pid
        if pid is None or self._hasten_beats[worker, 3] != pid:
            return "  (not known: SIGUSR2 has a handler of its own there)"
        path = Path(self._hasten_stacks) / str(worker)
        before = path.stat().st_size if path.exists() else 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
        for _ in range(50):  # 0.5 s: a worker in uninterruptible sleep (on a dead network disk) never answers
            time.sleep(0.01)
            with contextlib.suppress(OSError):
                text = path.read_bytes()[before:].decode(errors="replace")
                if text.rstrip().count("\n") and text.endswith("\n"):
                    return text
        return "  (it does not answer: perhaps it waits for a disk that is gone)"

    def _hasten_why(self, error: RuntimeError) -> str:
        """Return torch's message about a dead worker, with what it was making and what may have killed it."""
        ended = [worker for worker, process in enumerate(self._workers) if not process.is_alive()]
        lines = [str(error).strip()]
        lines += [f"hasten: it ended while {self._hasten_doing(worker)}" for worker in ended]
        codes = {self._workers[worker].exitcode for worker in ended}
        if -signal.SIGKILL in codes:
            lines.append(
                "hasten: SIGKILL is what the kernel ends processes with when memory is short (see `dmesg`): fewer "
                "workers, a smaller prefetch_factor, or more memory"
            )
        if -signal.SIGBUS in codes:
            lines.append(f"hasten: a bus error: shared memory is full, or a mapped file was cut short. {shm_text()}")
        return "\n".join(lines)

    def _hasten_room(self, batch: Any) -> None:
        """Warn if the prefetched batches will not fit in /dev/shm, judged by the size of the first batch."""
        size = shared_bytes(batch)
        ahead = size * (self._num_workers * self._prefetch_factor + 1)
        if self._hasten_free is not None and ahead > self._hasten_free:
            warn(
                f"batches of {size / 2**20:.1f} MB, {self._prefetch_factor} ahead by each of {self._num_workers} "
                f"workers and one in use, need {ahead / 2**20:.0f} MB of shared memory. {shm_text()}",
                stacklevel=2,
            )
