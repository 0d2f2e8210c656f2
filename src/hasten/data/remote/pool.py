"""A pool of daemon threads for fetching, so that Ctrl-C does not wait for a server that hangs."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from hasten.data.before_exit import busy

_Work = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Pool:
    """A few daemon threads that run calls in the order they are submitted.

    Args:
        threads: Number of threads.
        finishes: Whether the end of Python waits for a call that was begun: one in pyarrow, not one to a server.
    """

    def __init__(self, threads: int, *, finishes: bool = False) -> None:
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        for number in range(threads):
            working = busy() if finishes else contextlib.nullcontext()
            threading.Thread(
                target=_run, args=(self._work, working), name=f"hasten-fetch-{number}", daemon=True
            ).start()
        weakref.finalize(self, _end, self._work, threads).atexit = False

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue a call; return a future of its result or exception."""
        future: Future[Any] = Future()
        self._work.put((future, call, args))
        return future


def _end(work: queue.SimpleQueue[_Work | None], threads: int) -> None:
    for _ in range(threads):
        work.put(None)


def _run(work: queue.SimpleQueue[_Work | None], working: AbstractContextManager[Any]) -> None:
    """Run calls in a thread, without a reference to the pool: the pool can be freed, and that ends the thread."""
    while (item := work.get()) is not None:
        future, call, args = item
        if future.set_running_or_notify_cancel():
            try:
                with working:
                    result = call(*args)
                future.set_result(result)
                del result
            except BaseException as error:  # raised again by `future.result()`
                future.set_exception(error)
        del item, future, call, args  # else this frame keeps the last result alive until the next call
