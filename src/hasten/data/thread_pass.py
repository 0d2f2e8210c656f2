"""An iterator over a hasten DataLoader that makes batches in threads of this process."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections import deque
from typing import Any

import numpy as np
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hasten.data import default_type, rng
from hasten.data.before_exit import busy
from hasten.data.making_samples import only_makes_samples
from hasten.data.passes import HUNG, CountedPass
from hasten.data.row_block import RowBlock
from hasten.data.sample_fetcher import IDLE, Collate, SampleFetcher
from hasten.data.sample_keys import unmoved
from hasten.errors import HastenError
from hasten.frames import frame_of
from hasten.messages import warn


class _Task:
    """A batch to make, and later its result or error."""

    __slots__ = ("batch", "error", "finished", "indices", "is_last", "sets", "worker")

    def __init__(self, indices: Any) -> None:
        self.indices = indices
        self.sets = default_type.sets()
        self.finished = threading.Event()
        self.batch: Any = None
        self.error: BaseException | None = None
        self.worker: int | None = None
        self.is_last = True  # of those that a thread makes together


class ThreadPass(CountedPass, _BaseDataLoaderIter):
    """An iterator that makes batches in threads and yields them in order.

    It is for datasets that spend their time with the GIL released (files, decoding, NumPy, pyarrow): batches are not
    copied between processes, and memory is not duplicated. A dataset that draws from the process-wide generators, or
    from one that it holds, is refused, because threads share those; `hasten.data.sample_rng()` gives each sample
    generators of its own. Threads also share torch's default dtype: if the training sets it while it computes
    (`precision="64-true"`), batches are only made while the training waits for them.
    """

    def __init__(self, loader: Any) -> None:
        self._hasten_count(loader)
        super().__init__(loader)
        self._tasks: queue.SimpleQueue[list[_Task] | None] = queue.SimpleQueue()
        self._ahead: deque[_Task] = deque()
        self._beats = np.full((loader.num_workers, 4), IDLE, np.int64)
        self._named: set[tuple[int, int]] = set()
        self._closed = False
        self._waits = False  # whether a batch is only made on demand
        default_type.listen(self)
        if not loader.__dict__.get("_hasten_thread_safe"):
            _refuse_draws(loader)
            loader.__dict__["_hasten_thread_safe"] = True
        self._threads = [
            threading.Thread(
                target=_work,
                args=(self._tasks, self._maker(loader, number), number, loader.worker_init_fn),
                name=f"hasten-loader-{number}",
                daemon=True,
            )
            for number in range(loader.num_workers)
        ]
        for thread in self._threads:
            thread.start()
        for _ in range(loader.num_workers * (loader.prefetch_factor or 2)):
            self._put()

    def _maker(self, loader: Any, worker: int) -> Any:
        source = SampleFetcher(loader.dataset, loader.collate_fn, loader.on_error, shared=False)
        source.watched(self._beats[worker], worker)
        collate = Collate(loader.collate_fn, source, shares=False)
        pins = pin_memory if self._pin_memory else None

        def make(indices: Any) -> Any:
            batch = collate(source.__getitems__(indices))
            return batch if pins is None else pins(batch)  # type: ignore[no-untyped-call]

        return make

    def _put(self) -> None:
        """Queue the next batch of the pass, if there is one, for one thread with those whose rows are read with it."""
        tasks: list[_Task] = []
        try:
            while not tasks or (not self._waits and len(tasks) < _together(tasks[0].indices)):
                tasks.append(_Task(self._next_index()))  # type: ignore[no-untyped-call]
        except StopIteration:
            if not tasks:
                return
        for task in tasks[:-1]:
            task.is_last = False
        self._ahead += tasks
        self._tasks.put(tasks)

    def _hasten_made(self) -> Any:
        if self._waits and not self._ahead:
            self._put()
        if not self._ahead:
            self.close()
            raise StopIteration
        task = self._ahead[0]
        task_is_last = task.is_last
        self._wait_for(task)
        if task.sets != default_type.sets():  # the dtype was set since: `torch.tensor([0.5])` may be float64
            task = self._made_again(task)
        self._ahead.popleft()
        if task_is_last and not self._waits:
            self._put()
        if task.error is not None:
            raise task.error
        return task.batch

    def _made_again(self, task: _Task) -> _Task:
        """Make a batch again while the training waits, and from now on make batches only on demand."""
        if not self._waits:
            self._waits = True
            warn(
                "the training sets torch's default dtype while threads make batches, which share it: batches are made "
                'when they are asked for from here on; workers="process" makes them ahead',
                stacklevel=4,
            )
        retry = _Task(task.indices)
        self._tasks.put([retry])
        self._wait_for(retry)
        return retry

    def _wait_for(self, task: _Task) -> None:
        """Wait for a batch; warn if its thread hangs in one sample.

        Raises:
            RuntimeError: The loader's timeout is over.
        """
        started = time.monotonic()
        while not task.finished.wait(1.0):
            waited = time.monotonic() - started
            if self._timeout and waited >= self._timeout:
                raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds: {self._stuck(task)}")
            if task.worker is not None and time.monotonic() - self._beats[task.worker, 1] / 1e9 >= HUNG:
                self._name(task)

    def _name(self, task: _Task) -> None:
        """Warn about a hung thread, once for each sample."""
        assert task.worker is not None
        which = (task.worker, int(self._beats[task.worker, 1]))
        if which not in self._named:
            self._named.add(which)
            warn(f"the training waits: {self._stuck(task)}", stacklevel=2)

    def _stuck(self, task: _Task) -> str:
        if task.worker is None:
            return "no thread has begun the next batch"
        index, since, number, _ = self._beats[task.worker].tolist()
        frame = frame_of(self._threads[task.worker].ident)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "  (the thread has ended)"
        seconds = time.monotonic() - since / 1e9
        return (
            f"thread worker {task.worker} has been making sample {index}, of batch {number}, for {seconds:.1f} s; "
            f"its stack:\n{stack}"
        )

    def close(self) -> None:
        """Let the threads end, without waiting: a thread that hangs is a daemon."""
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._tasks.put(None)

    def __del__(self) -> None:
        if hasattr(self, "_threads"):
            self._ahead.clear()
            while True:  # drop the batches that no thread has begun
                try:
                    self._tasks.get_nowait()
                except queue.Empty:
                    break
            self.close()


def _together(indices: Any) -> int:
    """Return how many batches to make in one thread, beginning with this one."""
    block: RowBlock | None = getattr(indices, "block", None)
    return 1 if block is None else block.batches


def _work(tasks: Any, make: Any, worker: int, init: Any) -> None:
    """Run tasks in a thread. It holds no reference to the iterator, so that an abandoned pass is freed and ends it."""
    only_makes_samples()
    working = busy()
    failed: BaseException | None = None
    try:
        if init is not None:
            init(worker)
    except Exception as error:
        error.add_note(f"hasten: worker_init_fn failed in thread worker {worker}")
        failed = error
    while (together := tasks.get()) is not None:
        for task in together:
            task.worker = worker
            try:
                if failed is not None:
                    raise failed
                with working:
                    task.batch = make(task.indices)
            except BaseException as error:
                task.error = error
            task.finished.set()
        del together, task  # else this thread keeps the batches until it has others


def _refuse_draws(loader: Any) -> None:
    """Make one sample to check that the dataset draws from no generator that several threads would share.

    Raises:
        HastenError: It draws from the process-wide generators, or from one of its own.
    """
    if not len(loader.dataset):
        return
    source = SampleFetcher(loader.dataset, loader.collate_fn, "raise", shared=False)
    generators = {
        path: value for path, value in rng.find((loader.dataset, loader.collate_fn)).items() if rng.is_generator(value)
    }
    states = rng.states_of(generators)
    with unmoved():
        before, own_before = rng.digest(), rng.raw(generators)[-1]
        try:
            if source.reseed is not None:
                source.reseed(0)
            source.dataset[0] if source.read_batch is None else source.read_batch([0])
        except Exception:  # the pass will raise it again, where `on_error` applies
            return
        finally:
            if source.reseed is not None:
                source.reseed.over()
            own_after = rng.raw(generators)[-1]
            rng.set_states(generators, states)
        drew = rng.digest() != before
    if own_after != own_before:
        path = next(now[0] for now, then in zip(own_after, own_before, strict=True) if now != then).partition(".")[2]
        raise HastenError(
            f"samples of {type(loader.dataset).__name__} draw from a generator that it holds ({path}), and thread "
            "workers would draw from it in an order that differs from run to run",
            'use workers="process", or draw from hasten.data.sample_rng() in the dataset and its transforms',
        )
    if drew:
        raise HastenError(
            f"samples of {type(loader.dataset).__name__} draw from the process-wide random generators, which thread "
            "workers share with the training",
            'use workers="process", or draw from hasten.data.sample_rng() in the dataset and its transforms',
        )
