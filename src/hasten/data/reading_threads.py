"""Threads that make what comes next of a dataset, while the training goes on with what it has."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

from hasten.data import default_type
from hasten.data.opened import opened

_pools: weakref.WeakSet[Threads] = weakref.WeakSet()
_hooked = False
_PATIENCE = 10.0  # seconds that a fork waits for a thread


class Task:
    """Something to be made by whoever comes first: a thread, or the training when it needs it.

    Attributes:
        key: What it is made of.
        value: What was made.
        failed: Whether that raised: the training makes it then, and raises what it raises.
        files: The files it is made of, as they were then.
        doing: What else its making did: "writes x.txt".
        settled: Whether a later change of those files will show.
        sets: How often torch's default type had been set before it was asked for.
    """

    __slots__ = ("_claim", "_done", "doing", "failed", "files", "key", "sets", "settled", "value")

    def __init__(self, key: Any) -> None:
        self.key = key
        self.sets = default_type.sets()
        self._claim, self._done = threading.Lock(), threading.Event()
        self.value: Any = None
        self.failed = self.settled = False
        self.files: dict[str, Any] = {}
        self.doing = ""

    def claim(self) -> bool:
        """Whether the caller is the first, and makes it."""
        return self._claim.acquire(blocking=False)

    def wait(self) -> None:
        """Until the thread that claimed it has made it."""
        self._done.wait()

    def run(self, function: Callable[[Any], Any], context: Context) -> None:
        """Make it on this thread, unless somebody has claimed it."""
        if not self.claim():
            return
        try:
            with opened() as heard:
                self.value = context.run(function, self.key)
            self.files, self.doing, self.settled = heard.files, heard.doing, heard.settled()
        except BaseException:  # whatever it is: made once more by the training, it is raised there
            self.failed = True
        finally:
            self._done.set()


class Threads:
    """A few daemon threads that run tasks in the order they come.

    Nothing is under way in them while a process forks: a child has none of them, and would wait forever for a lock that
    one held.

    Args:
        count: How many.
        function: Makes what a task asks for.
    """

    def __init__(self, count: int, function: Callable[[Any], Any]) -> None:
        global _hooked
        self._tasks: queue.SimpleQueue[tuple[Task, Context] | None] = queue.SimpleQueue()
        self._busy = [threading.Lock() for _ in range(count)]
        self._held: list[Any] = []
        self.threads = [
            threading.Thread(
                target=_work, args=(self._tasks, function, busy), name=f"hasten-ahead-{number}", daemon=True
            )
            for number, busy in enumerate(self._busy)
        ]
        for thread in self.threads:
            thread.start()
        weakref.finalize(self, _end, self._tasks, count)
        _pools.add(self)
        if not _hooked:
            _hooked = True
            os.register_at_fork(before=_rest, after_in_parent=_go_on, after_in_child=_go_on)

    def put(self, task: Task) -> None:
        """Have a task run."""
        self._tasks.put((task, copy_context()))  # np.errstate and the like are a thread's own

    def rest(self) -> None:
        """Wait until each thread is between two tasks, and hold it there."""
        for thread, busy in zip(self.threads, self._busy, strict=True):
            # One that waits for a lock of the forking thread (an import under way) would never be through.
            if thread is not threading.current_thread() and busy.acquire(timeout=_PATIENCE):
                self._held.append(busy)

    def go_on(self) -> None:
        """After `rest`."""
        while self._held:
            self._held.pop().release()


def _work(tasks: Any, function: Callable[[Any], Any], busy: Any) -> None:
    """What a thread does; it holds nothing of who asked, so that it ends with that."""
    default_type.makes_samples()
    while (item := tasks.get()) is not None:
        with busy:
            item[0].run(function, item[1])
        del item


def _end(tasks: Any, count: int) -> None:
    for _ in range(count):
        tasks.put(None)


def _rest() -> None:
    for pool in list(_pools):
        pool.rest()


def _go_on() -> None:
    for pool in list(_pools):
        pool.go_on()
