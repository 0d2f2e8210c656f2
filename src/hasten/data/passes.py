"""Passes over a hasten DataLoader: in this process, or by torch's own worker processes, watched.

All are torch's iterators, so what listens to those (hasten's taps, profilers) listens to these.
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

HUNG = 4.0  # seconds in one sample after which a worker that is waited for is named
_CHECK = 1.0  # seconds between looks at workers that are waited for
_FIELDS = 4  # of a worker's beat: index, start, batch, process that can be asked for its stack


class Counted:
    """Counts, for the loader's state, the batches that an iterator gives; a mixin before torch's class."""

    _hasten_ledger: Any
    _hasten_place: Any

    def _hasten_count(self, loader: Any) -> None:
        self._hasten_ledger = loader.ledger
        self._hasten_place = loader.sampler.place

    def _hasten_made(self) -> Any:
        """The next batch, made."""
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
        place.over = False  # a tune cuts a pass short, and goes on with it by another iterator
        return batch


class InProcess(Counted, _SingleProcessDataLoaderIter):
    """Batches made by the training's own process, when they are asked for."""

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
    """A `worker_init_fn`: the user's own, and what lets the loader say what this worker does."""

    def __init__(self, then: Callable[[int], Any] | None, source: SampleFetcher, beats: Any, folder: str) -> None:
        self._then = then
        self._source = source
        self._beats = beats
        self._folder = folder
        # Linux ends such a child with the thread that started it, and only the main thread lives as long as we do.
        self._follows = threading.current_thread() is threading.main_thread()

    def __call__(self, worker: int) -> None:
        if self._follows:
            die_with_parent()
        # What the training holds stays shared: a collection that walks over it would copy it page by page (Energon's
        # PR 40). Frozen here and not before the fork, so that the training itself collects as before.
        gc.freeze()
        beat = np.frombuffer(self._beats, np.int64).reshape(-1, _FIELDS)[worker]
        info: Any = get_worker_info()
        source = self._source if info is None else info.dataset
        source.watched(beat, worker)
        if info is not None:
            object.__setattr__(info, "dataset", source.dataset)  # what a worker_init_fn expects there
        if self._then is not None:
            self._then(worker)
        if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
            file = (Path(self._folder) / str(worker)).open("w")
            self._file = file
            faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
            beat[3] = os.getpid()


class WorkerProcesses(Counted, DeferredWorkerDeath, _MultiProcessingDataLoaderIter):
    """Batches made by worker processes; one that is killed or hangs is named with what it was making."""

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
        self._hasten_over = 0  # parts on their way of a batch of which another part failed
        super()._reset(loader, first_iter)

    def _next_index(self) -> Any:
        return self._hasten_cut.next(super()._next_index)

    def _hasten_made(self) -> Any:
        while self._hasten_over:
            self._hasten_over -= 1
            with contextlib.suppress(Exception):  # the batch's first failure was raised
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
        """The batch that workers made in parts."""
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
        """Wait for the next answer of a worker, in short turns with a look at the workers between them."""
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
        """The worker whose batch comes next."""
        info = self._task_info.get(self._rcvd_idx)
        return info[0] if info is not None and len(info) == 1 else None

    def _hasten_seconds(self, worker: int) -> float:
        index, since = self._hasten_beats[worker, :2].tolist()
        return 0.0 if index == IDLE else time.monotonic() - since / 1e9

    def _hasten_name(self, worker: int) -> None:
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
        """What the worker's threads do: it says so itself when asked by a signal, also from within C code."""
        pid = self._workers[worker].pid
        if pid is None or self._hasten_beats[worker, 3] != pid:
            return "  (not known: SIGUSR2 has a handler of its own there)"
        path = Path(self._hasten_stacks) / str(worker)
        before = path.stat().st_size if path.exists() else 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
        for _ in range(50):  # half a second: a worker in uninterruptible sleep (a dead network disk) never answers
            time.sleep(0.01)
            with contextlib.suppress(OSError):
                text = path.read_bytes()[before:].decode(errors="replace")
                if text.rstrip().count("\n") and text.endswith("\n"):
                    return text
        return "  (it does not answer: perhaps it waits for a disk that is gone)"

    def _hasten_why(self, error: RuntimeError) -> str:
        """torch's message about a worker that ended, with what it was making and what may have ended it."""
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
        """Warn before /dev/shm is full, at the first batch, whose size says how much will lie there."""
        size = shared_bytes(batch)
        ahead = size * (self._num_workers * self._prefetch_factor + 1)
        if self._hasten_free is not None and ahead > self._hasten_free:
            warn(
                f"batches of {size / 2**20:.1f} MB, {self._prefetch_factor} ahead by each of {self._num_workers} "
                f"workers and one in use, need {ahead / 2**20:.0f} MB of shared memory. {shm_text()}",
                stacklevel=2,
            )
