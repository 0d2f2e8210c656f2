"""DataLoader workers whose RNG states the main process knows, and that can start in the middle of a pass.

In a worker, `_Stamp` wraps the collate function and sends the worker's RNG state along with a batch (`StampedBatch`) if
making it changed the state. In the main process, a subclass of torch's iterator records these states in a
`WorkerWatch`. On a resume, `_WorkerInit` restores them in new workers, and the iterator skips the consumed batches.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data._utils.worker import _IterableDatasetStopIteration
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from hasten.child import die_with_parent
from hasten.data import rng

_STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"
_DEPTH = 8  # states kept for each worker, because a wrapper may read a few batches ahead of the training


class WorkerWatch:
    """The main process's record of one set of workers, and how that set has to start.

    Args:
        states: Worker -> the RNG state (`rng.raw`) it starts with; other workers start as torch seeds them.
        base_seed: The base seed of the workers; None: torch draws it.
        skip: Consumed batches of the pass, whose indices are drawn and dropped.
        before_reset: Called once the workers run, before the pass begins.
        depth: How many of the latest states to keep for each worker.
    """

    def __init__(
        self,
        states: dict[int, Any] | None = None,
        base_seed: int | None = None,
        skip: int = 0,
        before_reset: Callable[[], None] | None = None,
        depth: int = _DEPTH,
    ) -> None:
        self.base_seed = base_seed
        self.skip = skip
        self.drew = self.short = False  # while skipping, the sampler drew random numbers; it ended too early
        self.before_reset = before_reset
        self.start = dict(states or {})
        self.number = 0  # number of workers
        self._depth = depth
        self._history: dict[int, deque[tuple[int, Any]]] = {}
        for worker, state in self.start.items():
            self.record(worker, 0, state)

    def record(self, worker: int, number: int, state: Any) -> None:
        """Record a worker's state after it made batch `number` of the pass (from 1)."""
        self._history.setdefault(worker, deque(maxlen=self._depth)).append((number, state))

    def at(self, batches: int) -> tuple[dict[int, Any], list[int]]:
        """Return the workers' states after `batches` batches, and the workers for which only later states are known."""
        known = {
            worker: next((state for number, state in reversed(history) if number <= batches), None)
            for worker, history in self._history.items()
        }
        # A history that is not full reaches back to the worker's start: until its first record, the worker has the
        # state that its seed gave it, and needs no saved state.
        lost = [w for w, state in known.items() if state is None and len(self._history[w]) == self._depth]
        return {worker: state for worker, state in known.items() if state is not None}, lost

    def next_pass(self) -> None:
        """Restart numbering at 0: each worker's latest state becomes its state at the start of a pass."""
        latest = {worker: history[-1][1] for worker, history in self._history.items()}
        self._history.clear()
        for worker, state in latest.items():
            self.record(worker, 0, state)


class StampedBatch:
    """A batch, with its worker's RNG state after making it."""

    __slots__ = ("batch", "state", "worker")

    def __init__(self, batch: Any, worker: int, state: Any) -> None:
        self.batch = batch
        self.worker = worker
        self.state = state

    def pin_memory(self) -> StampedBatch:
        """Called by torch's pin_memory thread."""
        return StampedBatch(pin_memory(self.batch), self.worker, self.state)


# In a worker process: the dataset's own generators, and the RNG state that was last reported.
_generators: dict[str, Any] = {}
_reported: Any = None


class _WorkerInit:
    """A `worker_init_fn` that runs the user's, then restores the RNG state with which this worker resumes."""

    def __init__(self, then: Callable[[int], Any] | None, collate: Any, states: dict[int, Any]) -> None:
        self._then = then
        self._collate = collate
        self._states = states
        # Linux sends the parent-death signal when the thread that forked the child ends, not its process. Only the
        # main thread is sure to live as long as the process.
        self._follows = threading.current_thread() is threading.main_thread()

    def __call__(self, worker: int) -> None:
        global _generators, _reported
        if self._follows:
            die_with_parent()
        if self._then is not None:
            self._then(worker)
        info = get_worker_info()
        _generators = rng.find({"dataset": info.dataset if info else None, "collate_fn": self._collate})
        if worker in self._states:
            states = rng.from_raw(self._states[worker])
            rng.restore(states)
            rng.set_states(_generators, states["own"])
        _reported = rng.raw(_generators)


class _Stamp:
    """A `collate_fn` that runs the user's, and adds the worker's RNG state if making the samples changed it."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        global _reported
        batch = self._collate(samples)
        now = rng.raw(_generators)
        info = get_worker_info()
        if now == _reported or info is None:
            return batch
        _reported = now
        return StampedBatch(batch, info.id, now)


def kind_of_workers(loader: Any) -> Any:
    """Return the class of the loader's iterator over workers; None if it has no workers, or they can't be watched."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return None
    make = type(loader)._get_iterator
    if make is DataLoader._get_iterator:
        return _MultiProcessingDataLoaderIter
    stateful_dataloader = sys.modules.get(_STATEFUL)
    if stateful_dataloader is not None and make is stateful_dataloader.StatefulDataLoader._get_iterator:
        return stateful_dataloader._StatefulMultiProcessingDataLoaderIter
    return None


def watch_of(iterator: Any) -> WorkerWatch | None:
    """Return the watch over an iterator's workers; None if it has none."""
    return getattr(iterator, "_hasten_watch", None)


@contextlib.contextmanager
def watching(loader: Any, watch: WorkerWatch) -> Iterator[None]:
    """Watch the workers that `iter(loader)` starts inside this context."""
    kind = kind_of_workers(loader)
    if kind is None:
        yield
        return
    loader._get_iterator = functools.partial(_open, loader, _watched(kind), watch)  # on this one loader only
    try:
        yield
    finally:
        del loader._get_iterator


def _open(loader: Any, kind: Any, watch: WorkerWatch) -> Any:
    loader.check_worker_number_rationality()
    options = (loader.next_iter_state,) if hasattr(loader, "next_iter_state") else ()
    collate, init = loader.collate_fn, loader.worker_init_fn
    if not _drawless(loader.dataset, collate):
        loader.collate_fn = _Stamp(collate)
    loader.worker_init_fn = _WorkerInit(init, collate, watch.start)
    watch.number = loader.num_workers
    try:
        iterator = kind(loader, watch, *options)
    finally:
        loader.collate_fn, loader.worker_init_fn = collate, init
    if options:
        loader.next_iter_state = None
    return iterator


def _drawless(dataset: Any, collate: Any) -> bool:
    """Return whether samples are rows of tensors, whose making draws no random numbers.

    Their loader then keeps its collate function, by which techniques recognize it.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and collate is default_collate


@functools.cache
def _watched(kind: Any) -> Any:
    """Return a subclass of torch's iterator `kind` that keeps a WorkerWatch; torch's code still does all the work."""

    class Watched(kind):  # type: ignore[misc]
        _task_info: dict[int, tuple[Any, ...]]

        def __init__(self, loader: Any, watch: WorkerWatch, *args: Any) -> None:
            self._hasten_watch = watch
            super().__init__(loader, *args)

        # torch assigns the base seed it drew in its __init__; a resumed watch keeps the saved one.
        @property
        def _base_seed(self) -> int | None:
            return self._hasten_watch.base_seed

        @_base_seed.setter
        def _base_seed(self, drawn: int) -> None:
            if self._hasten_watch.base_seed is None:
                self._hasten_watch.base_seed = drawn

        def _reset(self, loader: Any, first_iter: bool = False, **options: Any) -> None:
            if not first_iter:
                self.hasten_settle()
                self._hasten_watch.next_pass()
            elif (before_reset := self._hasten_watch.before_reset) is not None:
                self._hasten_watch.before_reset = None  # breaks a cycle: it holds the loader, which holds this iterator
                before_reset()
            super()._reset(loader, first_iter, **options)

        def _try_put_index(self) -> None:
            if self._hasten_watch.skip:  # before the first index of a resumed pass
                self._hasten_skip()
            super()._try_put_index()

        def _hasten_skip(self) -> None:
            batches, self._hasten_watch.skip = self._hasten_watch.skip, 0
            self._hasten_watch.short, self._hasten_watch.drew = advance(self, batches)
            for _ in range(batches % self._num_workers):  # batch i goes to worker i % n, as in the uninterrupted pass
                next(self._worker_queue_idx_cycle)

        def _process_data(self, data: Any, *args: Any) -> Any:
            batch = super()._process_data(data, *args)
            if type(batch) is not StampedBatch:
                return batch
            self._hasten_watch.record(batch.worker, self._num_yielded + 1, batch.state)
            return batch.batch

        def hasten_settle(self) -> None:
            settle(self)

    return Watched


def settle(iterator: Any) -> None:
    """Wait for the batches that workers are still making of an abandoned pass, and record their final states."""
    ended = {worker for worker, active in enumerate(iterator._workers_status) if not active}
    for data in map(_plainly, (data for info in iterator._task_info.values() for data in info[1:])):
        if isinstance(data, _IterableDatasetStopIteration):  # received early: earlier batches are not yielded yet
            ended.add(data.worker_id)
    while not iterator._shutdown and any(
        len(info) == 1 and info[0] not in ended for info in iterator._task_info.values()
    ):
        index, data = iterator._get_data()
        iterator._tasks_outstanding -= 1
        iterator._task_info[index] += (data,)
        if isinstance(_plainly(data), _IterableDatasetStopIteration):
            ended.add(_plainly(data).worker_id)  # this worker sends nothing more in this pass
    for index in sorted(iterator._task_info):
        for data in map(_plainly, iterator._task_info[index][1:]):
            if type(data) is StampedBatch:
                iterator._hasten_watch.record(data.worker, 0, data.state)


def _plainly(data: Any) -> Any:
    """Return a worker's batch, without the state that StatefulDataLoader's workers send with it."""
    return (
        data[0]
        if type(data) is tuple and data and type(data[0]) in (StampedBatch, _IterableDatasetStopIteration)
        else data
    )


def advance(iterator: Any, batches: int) -> tuple[bool, bool]:
    """Draw and drop the indices of `batches` batches, without fetching samples.

    Returns:
        Whether the sampler ended too early; and whether it drew from the process-wide generators after its first
        batch, between the training's own draws, which cannot be repeated exactly.
    """
    first = None
    try:
        for _ in range(batches):
            iterator._next_index()
            first = first or rng.digest()
    except StopIteration:
        return True, False
    return False, first is not None and first != rng.digest()
