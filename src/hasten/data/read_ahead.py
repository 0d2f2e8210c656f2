"""Reads ahead: threads call a dataset's `loader(path)` for coming samples; the samples are made in order.

`dataset[i]` is still called by the training, one after the other, on its own thread: augmentation draws the numbers it
would have drawn. Only when it comes to `self.loader(path)` is the image there already.
"""

from __future__ import annotations

import itertools
import operator
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
from hasten.evidence.machine import memory_free

_CHECKED, _WHOLE_LOOKS = 16, 2  # first calls, made by the training and looked over; after so many, whole looks
_AUDITED, _LOT = 8, 200  # images that are made again and compared: the first, and one in so many by lot
_BATCHES = 2  # whose indices are drawn ahead; how many of their samples are read is Depth's
_MOST_BYTES, _SHARE = 256 << 20, 8  # of samples read ahead: so many, and one in so many of what is free
_IN_VAIN = 2  # batches that ask for nothing that was read: then the pass is read no further (a cache has it all)
_MOST_HEARD = 10_000  # of a batch, or where the script asks for samples itself
_lot = random.Random()  # of its own: the training's numbers stay. No attribute, else states of the dataset hold it
_KEYS = (str, int, PurePath)


class ReadFunction:
    """A dataset's `loader(path)`, some of whose results are there before they are asked for.

    Args:
        function: The dataset's own.
        threads: How many make them.
        let_go: Told why nothing is read ahead any more.
    """

    def __init__(self, function: Any, threads: int, let_go: Callable[[str], None]) -> None:
        self.function = self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", "loader")
        self.heard: list[Any] = []  # what the batch that is being made has asked for
        self.ways: list[Any] = []  # see Foresight
        self._let_go, self._count = let_go, threads
        self._pid = os.getpid()
        self._pool: ThreadPool | None = None
        self._depth: Depth | None = None  # of the pass that began last
        self._ready: dict[Any, deque[tuple[Task, Depth]]] = {}
        self._checked = self._taken = 0
        self._size = 1
        self._lock = threading.RLock()  # two passes may be read by two threads of the script's
        self.over = False
        default_type.listen(self)
        self.look_again()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not isinstance(args[0], _KEYS) or self.over or self._pid != os.getpid():
            return self.function(*args, **kwargs)
        key = args[0]
        if len(self.heard) < _MOST_HEARD:
            self.heard.append(key)
        if self._checked < _CHECKED:
            return self._looked_over(key)
        task = self._take(key)
        if task is None or not self._may_give(task):
            return self.function(key)
        self._taken += 1
        if self._taken <= _AUDITED or _lot.random() * _LOT < 1:
            return self._audited(task)
        hear_again(task.files.items())
        return task.take()

    def __reduce__(self) -> Any:
        # A copy has the dataset's own function; called by Python's own means, so that a pickle needs no hasten.
        return operator.getitem, ((self.function,), 0)

    @property
    def ready(self) -> bool:
        """Whether enough calls were looked over to let threads make others."""
        return self._checked >= _CHECKED and not self.over and self._pid == os.getpid()

    def look_again(self) -> None:
        """Look at all that the function depends on; called between passes, in which it may change."""
        self._snapshot = Snapshot({"loader": self.function})
        self._budget = min(_MOST_BYTES, memory_free() // _SHARE)
        if why := why_not_threaded(self._snapshot):
            self.end(why)

    def end(self, why: str) -> None:
        """Read nothing ahead from here on."""
        if not self.over:
            self.over = True
            self.drop([task for kept in self._ready.values() for task, _ in kept])
            self._let_go(why)

    def depth(self) -> Depth:
        """Return what says how far a pass that begins is read ahead."""
        self._depth = Depth(self._count, self._budget, self._size, self._depth.room if self._depth else 0)
        return self._depth

    def turn(self, depth: Depth) -> None:
        """Have a pass read as far ahead as its last batch showed to be of use."""
        with self._lock:  # a pass in another thread may take what this one asked for
            depth.turn()

    def want(self, key: Any, depth: Depth) -> Task:
        """Have what a key stands for made as soon as its pass has room for it."""
        task = Task(key)
        with self._lock:
            self._ready.setdefault(key, deque()).append((task, depth))
            depth.waiting.append(task)
            self._feed(depth)
        return task

    def drop(self, tasks: list[Task]) -> int:
        """Forget what was not asked for; returns how many that were."""
        left = 0
        with self._lock:
            for task in reversed(tasks):  # those first that no thread has yet
                if (depth := self._depth_of(task)) is not None:
                    left += 1
                    task.claim()
                    self._forget(task, depth)
        return left

    def _depth_of(self, task: Task) -> Depth | None:
        """Its pass's depth; None where it was taken, or dropped."""
        return next((depth for other, depth in self._ready.get(task.key, ()) if other is task), None)

    def _take(self, key: Any) -> Task | None:
        with self._lock:
            kept = self._ready.get(key)
            if not kept:
                return None
            task, depth = kept[0]
            self._forget(task, depth)
        if task.claim():  # no thread has begun it
            depth.made_itself()
            return None
        depth.took(task, task.wait())
        return task

    def _forget(self, task: Task, depth: Depth) -> None:
        kept = self._ready[task.key]
        kept.remove((task, depth))
        if not kept:
            del self._ready[task.key]
        depth.forget(task)
        self._feed(depth)

    def _feed(self, depth: Depth) -> None:
        while not self.over and (task := depth.next()) is not None:
            if self._pool is None:
                self._pool = ThreadPool(self._count, self.function)
            self._pool.put(task)

    def _may_give(self, task: Task) -> bool:
        """Whether what a thread made is what the training would make now."""
        if changed := self._snapshot.changed():
            self.end(f"{changed} changed during a pass")
        elif task.doing:
            self.end(f"reading a sample {task.doing}")
        elif task.sets != default_type.sets():
            self.end("torch's default dtype is set while threads read, and they share it")
        return not (self.over or task.failed) and task.settled and not changed_file(task.files)

    def _audited(self, task: Task) -> Any:
        before = random_states()
        made = self.function(task.key)
        if random_states() != before:
            self.end("its function draws random numbers")
        elif pack(made) != pack(task.take()):
            self.end("a file gave another sample than before")
        return made

    def _looked_over(self, key: Any) -> Any:
        before = random_states()
        with opened() as heard:
            made = self.function(key)
        self._checked += 1
        whole = self._checked <= _WHOLE_LOOKS
        if random_states() != before:
            self.end("its function draws random numbers")
        elif heard.doing:
            self.end(f"reading a sample {heard.doing}")
        elif self._snapshot.changed_at_all() if whole else self._snapshot.changed_small():
            self.end("reading a sample changes what its function depends on")
        elif why := why_no_round_trip(made):
            self.end(f"what its function gives {why}")
        else:
            self._size = max(self._size, bytes_of(made) or (len(pack(made)) if whole else 1))
        return made


class ReadAheadSampler:
    """A pass's batches of indices, drawn ahead so that files are read before their samples are made.

    Takes the place of an iterator's `_sampler_iter`. It draws no further than the pass is long: a sampler that is asked
    for more than its last batch may draw once more from its generator.

    Args:
        iterator: torch's own, over a loader without workers.
        function: The dataset's.
        foresight: What samples will ask for.
    """

    def __init__(self, iterator: Any, function: ReadFunction, foresight: FilePredictor) -> None:
        sampler = iterator._index_sampler
        self._order: Iterator[list[int]] = iterator._sampler_iter
        self._left = len(sampler) - iterator._num_yielded
        self._sampler = getattr(sampler, "hasten_whole", sampler)  # a trial cuts it
        self._size = self._sampler.batch_size
        self._function, self._foresight = function, foresight
        self._depth = function.depth()
        self._drawn: deque[tuple[list[int], list[Task]]] = deque()
        self._given: tuple[list[int], list[Task]] = ([], [])
        self._in_vain = 0
        function.heard.clear()

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        self._end_of_batch()
        if not self._sampler.drop_last and self._sampler.batch_size != self._size:
            self._batch_again()
        if self._reads():
            self._draw()
        self._given = self._drawn.popleft() if self._drawn else (self._next(), [])
        return self._given[0]

    def _next(self) -> list[int]:
        self._left -= 1
        return next(self._order)

    def _reads(self) -> bool:
        usable = self._function.ready and self._foresight.knows and self._in_vain < _IN_VAIN
        return usable and _as_on_any_thread()

    def _draw(self) -> None:
        while self._left > 0 and len(self._drawn) <= _BATCHES:
            try:
                batch = self._next()
            except StopIteration:  # a trial ends it early
                self._left = 0
                return
            keys = [key for index in batch for key in self._foresight.keys(index)]
            self._drawn.append((batch, [self._function.want(key, self._depth) for key in keys]))

    def _end_of_batch(self) -> None:
        """Learn from the batch that was made, and drop what it did not ask for."""
        batch, tasks = self._given
        function = self._function
        function.turn(self._depth)
        if batch and not self._foresight.knows:
            self._foresight.learn(batch, function.heard)
        function.heard.clear()
        if tasks:
            unused = function.drop(tasks)
            self._in_vain = self._in_vain + 1 if unused == len(tasks) else 0
            if self._in_vain >= _IN_VAIN:
                self._stop()
        self._given = ([], [])

    def _stop(self) -> None:
        for number, (batch, tasks) in enumerate(self._drawn):
            self._function.drop(tasks)
            self._drawn[number] = (batch, [])

    def _batch_again(self) -> None:
        """The batch size changed: what was drawn ahead is put into batches of the new one."""
        self._stop()
        rest = itertools.chain.from_iterable([batch for batch, _ in self._drawn])
        self._drawn.clear()
        self._order = batches(itertools.chain(rest, itertools.chain.from_iterable(self._order)), self._sampler)
        self._size, self._left, self._in_vain = self._sampler.batch_size, 0, _IN_VAIN

    def __del__(self) -> None:
        if not sys.is_finalizing():  # a pass that was left: nobody will ask for the rest
            self._stop()


def _as_on_any_thread() -> bool:
    """Whether a thread of its own computes as this one: no autocast, inference mode or default device is on here."""
    import torch

    _, autocast, inference = ambient()
    return autocast is None and not inference and torch.get_default_device().type == "cpu"
