"""DataLoader workers whose random states the main process knows, and which can be started in the middle of a pass."""

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
_DEPTH = 8  # states kept of each worker: something may read a few batches ahead of the training


class WorkerWatch:
    """The main process's record of one set of workers, and how the next set has to start.

    Args:
        states: By worker, the random state (`rng.raw`) it starts with; others start as torch seeds them.
        base_seed: What torch seeds workers with; None: what it draws.
        skip: Batches of the pass that are over: their indices are drawn and dropped.
        before_reset: Called when the workers run, before the pass begins.
        depth: How many of the latest states are kept of each worker.
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
        self.drew = self.short = False  # the sampler drew while it was advanced; it ended before that
        self.before_reset = before_reset
        self.start = dict(states or {})
        self.number = 0  # of workers
        self._depth = depth
        self._history: dict[int, deque[tuple[int, Any]]] = {}
        for worker, state in self.start.items():
            self.record(worker, 0, state)

    def record(self, worker: int, number: int, state: Any) -> None:
        """Note the state in which a worker was when it had made batch `number` of the pass (from 1)."""
        self._history.setdefault(worker, deque(maxlen=self._depth)).append((number, state))

    def at(self, batches: int) -> tuple[dict[int, Any], list[int]]:
        """States as of the last of `batches` batches; and workers of which only later ones are known."""
        known = {
            worker: next((state for number, state in reversed(history) if number <= batches), None)
            for worker, history in self._history.items()
        }
        # A history that is not full goes back to the start, where a worker is as its seed made it.
        lost = [w for w, state in known.items() if state is None and len(self._history[w]) == self._depth]
        return {worker: state for worker, state in known.items() if state is not None}, lost

    def next_pass(self) -> None:
        """Restart numbering at 0."""
        latest = {worker: history[-1][1] for worker, history in self._history.items()}
        self._history.clear()
        for worker, state in latest.items():
            self.record(worker, 0, state)


class Stamped:
    """A batch, and the random state its worker was in afterwards."""

    __slots__ = ("batch", "state", "worker")

    def __init__(self, batch: Any, worker: int, state: Any) -> None:
        self.batch = batch
        self.worker = worker
        self.state = state

    def pin_memory(self) -> Stamped:
        """Called by torch's pin_memory thread."""
        return Stamped(pin_memory(self.batch), self.worker, self.state)


_generators: dict[str, Any] = {}  # in a worker process: its dataset's own generators, and the state last reported
_reported: Any = None


class _WorkerInit:
    """A `worker_init_fn`: the user's own, then the state that this worker is to go on from."""

    def __init__(self, then: Callable[[int], Any] | None, collate: Any, states: dict[int, Any]) -> None:
        self._then = then
        self._collate = collate
        self._states = states
        # Linux ends such a child with the thread that started it, and only the main thread lives as long as we do.
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
    """A `collate_fn`: the user's own, and the worker's random state, if drawing samples changed it."""

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
        return Stamped(batch, info.id, now)


def kind_of_workers(loader: Any) -> Any:
    """The class of iterator over workers that this loader makes; None if it is not one that can be watched."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return None
    make = type(loader)._get_iterator
    if make is DataLoader._get_iterator:
        return _MultiProcessingDataLoaderIter
    room = sys.modules.get(_STATEFUL)
    if room is not None and make is room.StatefulDataLoader._get_iterator:
        return room._StatefulMultiProcessingDataLoaderIter
    return None


def watch_of(iterator: Any) -> WorkerWatch | None:
    """The watch over the workers of this iterator, if it has one."""
    return getattr(iterator, "_hasten_watch", None)


@contextlib.contextmanager
def watching(loader: Any, watch: WorkerWatch) -> Iterator[None]:
    """Let workers that `iter(loader)` starts inside be watched."""
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
    """Rows of tensors draw nothing; their loader keeps its collate function, by which techniques know it."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and collate is default_collate


@functools.cache
def _watched(kind: Any) -> Any:
    """torch's iterator over workers, with a Watch: its own code does all the work."""

    class Watched(kind):  # type: ignore[misc]
        _task_info: dict[int, tuple[Any, ...]]

        def __init__(self, loader: Any, watch: WorkerWatch, *args: Any) -> None:
            self._hasten_watch = watch
            super().__init__(loader, *args)

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
                self._hasten_watch.before_reset = None  # it knows the loader, which knows this iterator: no circle
                before_reset()
            super()._reset(loader, first_iter, **options)

        def _try_put_index(self) -> None:
            if self._hasten_watch.skip:  # the first index of a pass that was resumed in its middle
                self._hasten_skip()
            super()._try_put_index()

        def _hasten_skip(self) -> None:
            batches, self._hasten_watch.skip = self._hasten_watch.skip, 0
            self._hasten_watch.short, self._hasten_watch.drew = advance(self, batches)
            for _ in range(batches % self._num_workers):  # batch i is made by worker i % n, as it would have been
                next(self._worker_queue_idx_cycle)

        def _process_data(self, data: Any, *args: Any) -> Any:
            batch = super()._process_data(data, *args)
            if type(batch) is not Stamped:
                return batch
            self._hasten_watch.record(batch.worker, self._num_yielded + 1, batch.state)
            return batch.batch

        def hasten_settle(self) -> None:
            settle(self)

    return Watched


def settle(iterator: Any) -> None:
    """Wait for what the workers still make of a pass that was cut short; their states afterwards count."""
    ended = {worker for worker, active in enumerate(iterator._workers_status) if not active}
    for data in map(_plainly, (data for info in iterator._task_info.values() for data in info[1:])):
        if isinstance(data, _IterableDatasetStopIteration):  # it came before batches that are not given yet
            ended.add(data.worker_id)
    while not iterator._shutdown and any(
        len(info) == 1 and info[0] not in ended for info in iterator._task_info.values()
    ):
        index, data = iterator._get_data()
        iterator._tasks_outstanding -= 1
        iterator._task_info[index] += (data,)
        if isinstance(_plainly(data), _IterableDatasetStopIteration):
            ended.add(_plainly(data).worker_id)  # it answers nothing more in this pass
    for index in sorted(iterator._task_info):
        for data in map(_plainly, iterator._task_info[index][1:]):
            if type(data) is Stamped:
                iterator._hasten_watch.record(data.worker, 0, data.state)


def _plainly(data: Any) -> Any:
    """Return a worker's batch: StatefulDataLoader's workers send more with it."""
    return (
        data[0] if type(data) is tuple and data and type(data[0]) in (Stamped, _IterableDatasetStopIteration) else data
    )


def advance(iterator: Any, batches: int) -> tuple[bool, bool]:
    """Draw and drop the indices of `batches` batches, without fetching samples.

    Returns:
        Whether the sampler ended before that; whether it drew from the process-wide generators later than for its
        first batch, when a training has drawn from them too.
    """
    first = None
    try:
        for _ in range(batches):
            iterator._next_index()
            first = first or rng.digest()
    except StopIteration:
        return True, False
    return False, first is not None and first != rng.digest()
