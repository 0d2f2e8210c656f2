"""Reads ahead: threads call a dataset's `loader(path)` for coming samples, while the samples are made in order.

The training still calls `dataset[i]` sample by sample on its own thread, so augmentation draws the same random
numbers. But when the sample calls `self.loader(path)`, the image is loaded already.

`ReadAheadSampler` draws the indices of coming batches, `FilePredictor` predicts their paths, and `ReadFunction`, in
place of the dataset's loader function, has a `ThreadPool` load them; `Depth` limits how many. A result is used only if
nothing that the function depends on has changed, and some results are loaded again and compared. On any doubt reading
ahead ends, and the original function is called.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

from hasten.data import default_type
from hasten.data.determinism import why_not_threaded
from hasten.data.file_predictor import FilePredictor
from hasten.data.opened_files import changed_file, hear_again, opened
from hasten.data.read_ahead_depth import Depth
from hasten.data.reading_threads import Task, ThreadPool, bytes_of
from hasten.data.round_trip import why_no_round_trip
from hasten.data.sample_store import pack
from hasten.data.sampler_order import batches
from hasten.data.snapshot import Snapshot, ambient, random_states
from hasten.data.stand_in import plain_copy
from hasten.evidence.machine import memory_free

_CHECKED, _WHOLE_LOOKS = 16, 2  # first calls, which the training makes and checks; how many of them check in full
_AUDITED, _LOT = 8, 200  # results that are made again and compared: the first 8, then 1 in 200 at random
_BATCHES = 2  # batches whose indices are drawn ahead; Depth decides how many of their samples are read
_MOST_BYTES, _SHARE = 256 << 20, 8  # limits of the samples read ahead: bytes, and 1/8 of the free memory
_IN_VAIN = 2  # batches that used nothing that was read: stop reading this pass ahead (a cache may have everything)
_MOST_HEARD = 10_000  # keys recorded, for a script that calls the dataset outside of batches
# A separate generator, so that the training's is not moved; not an attribute, else saved states of the dataset hold it.
_lot = random.Random()
_KEYS = (str, int, PurePath)


class ReadFunction:
    """A wrapper around a dataset's `loader(path)` that returns results which threads have made ahead.

    Args:
        function: The dataset's loader function.
        threads: Number of threads.
        let_go: Called with the reason when reading ahead ends.
    """

    def __init__(self, function: Any, threads: int, let_go: Callable[[str], None]) -> None:
        self.function = function
        self.requested_keys: list[Any] = []  # the keys that the current batch has asked for
        self.ways: list[Any] = []  # see FilePredictor
        self._let_go, self._count = let_go, threads
        self._pid = os.getpid()
        self._pool: ThreadPool | None = None
        self._depth: Depth | None = None  # of the pass that began last
        self._ready: dict[Any, deque[tuple[Task, Depth]]] = {}
        self._checked = self._results_taken = 0
        self._size = 1
        self._lock = threading.RLock()  # two threads of the script may iterate over two passes
        self.over = False
        default_type.listen(self)
        self.look_again()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not isinstance(args[0], _KEYS) or self.over or self._pid != os.getpid():
            return self.function(*args, **kwargs)
        key = args[0]
        if len(self.requested_keys) < _MOST_HEARD:
            self.requested_keys.append(key)
        if self._checked < _CHECKED:
            return self._looked_over(key)
        task = self._take(key)
        if task is None or not self._may_give(task):
            return self.function(key)
        self._results_taken += 1
        if self._results_taken <= _AUDITED or _lot.random() * _LOT < 1:
            return self._audited(task)
        hear_again(task.files.items())
        return task.take()

    def __reduce__(self) -> Any:
        return plain_copy(self.function)

    @property
    def ready(self) -> bool:
        """Whether enough calls were checked to let threads make others."""
        return self._checked >= _CHECKED and not self.over and self._pid == os.getpid()

    def look_again(self) -> None:
        """Take a new snapshot of everything the function depends on; called between passes, when it may change."""
        self._snapshot = Snapshot({"loader": self.function})
        self._budget = min(_MOST_BYTES, memory_free() // _SHARE)
        if why := why_not_threaded(self._snapshot):
            self.end(why)

    def end(self, why: str) -> None:
        """Read nothing ahead from now on."""
        if not self.over:
            self.over = True
            self.drop([task for entries in self._ready.values() for task, _ in entries])
            self._let_go(why)

    def depth(self) -> Depth:
        """Return a new pass's Depth, which decides how far to read ahead."""
        self._depth = Depth(self._count, self._budget, self._size, self._depth.room if self._depth else 0)
        return self._depth

    def turn(self, depth: Depth) -> None:
        """Adjust how far a pass is read ahead, by what its last batch showed."""
        with self._lock:  # a pass in another thread may take this pass's tasks
            depth.turn()

    def want(self, key: Any, depth: Depth) -> Task:
        """Request a key's result, to be made as soon as its pass has room for it."""
        task = Task(key)
        with self._lock:
            self._ready.setdefault(key, deque()).append((task, depth))
            depth.waiting.append(task)
            self._feed(depth)
        return task

    def drop(self, tasks: list[Task]) -> int:
        """Drop tasks whose results were not used; return how many those were."""
        left = 0
        with self._lock:
            for task in reversed(tasks):  # begin with those that no thread has yet
                if (depth := self._depth_of(task)) is not None:
                    left += 1
                    task.claim()
                    self._forget(task, depth)
        return left

    def _depth_of(self, task: Task) -> Depth | None:
        """Return the depth of a task's pass; None if the task was taken or dropped already."""
        return next((depth for other, depth in self._ready.get(task.key, ()) if other is task), None)

    def _take(self, key: Any) -> Task | None:
        """Return the finished task of a key; None if there is none, or no thread has begun it."""
        with self._lock:
            entries = self._ready.get(key)
            if not entries:
                return None
            task, depth = entries[0]
            self._forget(task, depth)
        if task.claim():  # no thread has begun it: the training makes it
            depth.made_itself()
            return None
        depth.took(task, task.wait())
        return task

    def _forget(self, task: Task, depth: Depth) -> None:
        entries = self._ready[task.key]
        entries.remove((task, depth))
        if not entries:
            del self._ready[task.key]
        depth.forget(task)
        self._feed(depth)

    def _feed(self, depth: Depth) -> None:
        while not self.over and (task := depth.next()) is not None:
            if self._pool is None:
                self._pool = ThreadPool(self._count, self.function)
            self._pool.put(task)

    def _may_give(self, task: Task) -> bool:
        """Return whether a thread's result is what the training would make now."""
        if changed := self._snapshot.changed():
            self.end(f"{changed} changed during a pass")
        elif task.doing:
            self.end(f"reading a sample {task.doing}")
        elif task.sets != default_type.sets():
            self.end("torch's default dtype is set while threads read, and they share it")
        return not (self.over or task.failed) and task.settled and not changed_file(task.files)

    def _audited(self, task: Task) -> Any:
        """Make a thread's result again, compare the two, and return the new one."""
        before = random_states()
        made = self.function(task.key)
        if random_states() != before:
            self.end("its function draws random numbers")
        elif pack(made) != pack(task.take()):
            self.end("a file gave another sample than before")
        return made

    def _looked_over(self, key: Any) -> Any:
        """Call the function on this thread, and end reading ahead if the call does something that forbids it."""
        before = random_states()
        with opened() as record:
            result = self.function(key)
        self._checked += 1
        in_full = self._checked <= _WHOLE_LOOKS
        if random_states() != before:
            self.end("its function draws random numbers")
        elif record.doing:
            self.end(f"reading a sample {record.doing}")
        elif self._snapshot.changed_at_all() if in_full else self._snapshot.changed_small():
            self.end("reading a sample changes what its function depends on")
        elif why := why_no_round_trip(result):
            self.end(f"what its function gives {why}")
        else:
            self._size = max(self._size, bytes_of(result) or (len(pack(result)) if in_full else 1))
        return result


class ReadAheadSampler:
    """An iterator over a pass's batches of indices that draws them ahead and requests their files.

    It replaces `_sampler_iter` of torch's iterator. It never draws past the end of the pass, because a sampler that is
    asked for another batch after its last may draw from its generator once more.

    Args:
        iterator: torch's iterator over a loader without workers.
        function: The wrapper around the dataset's loader function.
        foresight: Predicts what samples will ask for.
    """

    def __init__(self, iterator: Any, function: ReadFunction, foresight: FilePredictor) -> None:
        sampler = iterator._index_sampler
        self._order: Iterator[list[int]] = iterator._sampler_iter
        self._batches_left = len(sampler) - iterator._num_yielded
        self._sampler = getattr(sampler, "hasten_whole", sampler)  # the whole sampler, if a trial shortens it
        self._size = self._sampler.batch_size
        self._function, self._foresight = function, foresight
        self._depth = function.depth()
        self._drawn: deque[tuple[list[int], list[Task]]] = deque()
        self._current: tuple[list[int], list[Task]] = ([], [])
        self._in_vain = 0
        function.requested_keys.clear()

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        self._end_of_batch()
        if not self._sampler.drop_last and self._sampler.batch_size != self._size:
            self._batch_again()
        if self._reads():
            self._draw()
        self._current = self._drawn.popleft() if self._drawn else (self._next(), [])
        return self._current[0]

    def _next(self) -> list[int]:
        self._batches_left -= 1
        return next(self._order)

    def _reads(self) -> bool:
        """Return whether to read ahead now."""
        usable = self._function.ready and self._foresight.knows and self._in_vain < _IN_VAIN
        return usable and _as_on_any_thread()

    def _draw(self) -> None:
        """Draw the indices of coming batches and request their files."""
        while self._batches_left > 0 and len(self._drawn) <= _BATCHES:
            try:
                batch = self._next()
            except StopIteration:  # a trial ends the pass early
                self._batches_left = 0
                return
            keys = [key for index in batch for key in self._foresight.keys(index)]
            self._drawn.append((batch, [self._function.want(key, self._depth) for key in keys]))

    def _end_of_batch(self) -> None:
        """Learn from the batch that was made, and drop the results that it did not use."""
        batch, tasks = self._current
        function = self._function
        function.turn(self._depth)
        if batch and not self._foresight.knows:
            self._foresight.learn(batch, function.requested_keys)
        function.requested_keys.clear()
        if tasks:
            unused = function.drop(tasks)
            self._in_vain = self._in_vain + 1 if unused == len(tasks) else 0
            if self._in_vain >= _IN_VAIN:
                self._stop()
        self._current = ([], [])

    def _stop(self) -> None:
        """Drop all requests of this pass, but keep the drawn indices."""
        for number, (batch, tasks) in enumerate(self._drawn):
            self._function.drop(tasks)
            self._drawn[number] = (batch, [])

    def _batch_again(self) -> None:
        """Put the indices that were drawn ahead into batches of the new batch size, and read no further ahead."""
        self._stop()
        rest = itertools.chain.from_iterable([batch for batch, _ in self._drawn])
        self._drawn.clear()
        self._order = batches(itertools.chain(rest, itertools.chain.from_iterable(self._order)), self._sampler)
        self._size, self._batches_left, self._in_vain = self._sampler.batch_size, 0, _IN_VAIN

    def __del__(self) -> None:
        if not sys.is_finalizing():  # an abandoned pass: nobody will use the rest
            self._stop()


def _as_on_any_thread() -> bool:
    """Return whether other threads compute as this one: without autocast, inference mode or a default device."""
    import torch

    _, autocast, inference = ambient()
    return autocast is None and not inference and torch.get_default_device().type == "cpu"
