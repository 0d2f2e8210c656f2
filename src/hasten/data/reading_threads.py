"""A thread pool that prefetches from a dataset during the training, and pauses while the process forks."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

from hasten.data import default_type
from hasten.data.before_exit import busy
from hasten.data.making_samples import only_makes_samples
from hasten.data.opened_files import opened
from hasten.data.round_trip import is_plain_array

_pools: weakref.WeakSet[ThreadPool] = weakref.WeakSet()
_hooked = False
_FEW = 8  # largest tuple whose parts' sizes are added up
_PATIENCE = 10.0  # seconds that a fork waits for a thread


class Task:
    """A result to be made by whoever claims it first: a thread, or the training when it needs it.

    Attributes:
        key: The argument it is made from.
        value: The result.
        failed: Whether making it raised; the training then makes it again and raises the error itself.
        files: The files it was read from, with their versions.
        doing: Another effect of making it: "writes x.txt"; "" if none.
        settled: Whether a later change of those files would be noticed.
        sets: How often torch's default dtype had been set when the task was made (see default_type).
        size: Bytes that `value` takes in memory; 0: not made, or not known.
        seconds: How long a thread took to make it.
        made_at: When it was made (perf_counter); 0.0 before.
    """

    __slots__ = (
        *("_claim", "_finished", "doing", "failed", "files", "key", "made_at", "seconds", "sets"),
        *("settled", "size", "value"),
    )

    def __init__(self, key: Any) -> None:
        self.key = key
        self.size, self.seconds, self.made_at = 0, 0.0, 0.0
        self.sets = default_type.sets()
        self._claim, self._finished = threading.Lock(), threading.Event()
        self.value: Any = None
        self.failed = self.settled = False
        self.files: dict[str, Any] = {}
        self.doing = ""

    def claim(self) -> bool:
        """Claim the task; return whether the caller is the first, and so has to make it."""
        return self._claim.acquire(blocking=False)

    def wait(self) -> float:
        """Wait until the thread that claimed it has made it; return the seconds waited."""
        if self._finished.is_set():
            return 0.0
        began = time.perf_counter()
        self._finished.wait()
        return time.perf_counter() - began

    def take(self) -> Any:
        """Return the result and drop the reference to it: the training may free it long before the batch ends."""
        value, self.value = self.value, None
        return value

    def run(self, function: Callable[[Any], Any], context: Context) -> None:
        """Make the result on this thread, unless the task is claimed already."""
        if not self.claim():
            return
        started = time.perf_counter()
        try:
            with opened() as record:
                self.value = context.run(function, self.key)
            self.files, self.doing, self.settled = record.files, record.doing, record.settled()
            self.size = bytes_of(self.value)
        except BaseException:  # the training will make it again, and raise the error there
            self.failed = True
        finally:
            self.made_at = time.perf_counter()
            self.seconds = self.made_at - started
            self._finished.set()


def bytes_of(sample: Any) -> int:
    """Return the bytes that a sample takes in memory; 0 if its type is unknown."""
    kind = type(sample)
    if kind is tuple and len(sample) <= _FEW:
        return sum(map(bytes_of, sample))
    if kind.__module__.startswith("PIL."):  # Pillow keeps a pixel of RGB in four bytes
        return int(sample.width * sample.height * (1 if sample.mode in ("1", "L", "P") else 4))
    if kind in (bytes, str):
        return sys.getsizeof(sample)
    return int(getattr(sample, "nbytes", 0)) if is_plain_array(sample) else 0


class ThreadPool:
    """A few daemon threads that run tasks in the order they are put.

    They pause while the process forks: the child has no such threads, and would wait forever for a lock that one of
    them held at that moment.

    Args:
        count: Number of threads.
        function: Makes a task's result from its key.
    """

    def __init__(self, count: int, function: Callable[[Any], Any]) -> None:
        global _hooked
        self._tasks: queue.SimpleQueue[tuple[Task, Context] | None] = queue.SimpleQueue()
        self._busy = [busy() for _ in range(count)]
        self._paused: list[Any] = []
        self.threads = [
            threading.Thread(
                target=_work, args=(self._tasks, function, working), name=f"hasten-ahead-{number}", daemon=True
            )
            for number, working in enumerate(self._busy)
        ]
        for thread in self.threads:
            thread.start()
        weakref.finalize(self, _end, self._tasks, count)
        _pools.add(self)
        if not _hooked:
            _hooked = True
            os.register_at_fork(before=_pause_all, after_in_parent=_go_on, after_in_child=_go_on)

    def put(self, task: Task) -> None:
        """Queue a task."""
        self._tasks.put((task, copy_context()))  # np.errstate and the like are context variables

    def pause(self) -> None:
        """Wait until each thread is between two tasks, and hold it there."""
        for thread, working in zip(self.threads, self._busy, strict=True):
            # With a timeout: a thread that waits for a lock of the forking thread (during an import) never finishes.
            if thread is not threading.current_thread() and working.acquire(timeout=_PATIENCE):
                self._paused.append(working)

    def go_on(self) -> None:
        """Let the threads continue after `pause`."""
        while self._paused:
            self._paused.pop().release()


def _work(tasks: Any, function: Callable[[Any], Any], working: Any) -> None:
    """Run tasks in a thread, without a reference to the pool: the pool can be freed, and that ends the thread."""
    only_makes_samples()
    while (item := tasks.get()) is not None:
        with working:
            item[0].run(function, item[1])
        del item


def _end(tasks: Any, count: int) -> None:
    for _ in range(count):
        tasks.put(None)


def _pause_all() -> None:
    for pool in list(_pools):
        pool.pause()


def _go_on() -> None:
    for pool in list(_pools):
        pool.go_on()
