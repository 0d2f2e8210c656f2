"""Loaders' workers stay when SIGTERM reaches all processes of a training: it may need their batches until it has saved.

SLURM and `kill -- -PGID` send it to all of them. torch's worker ends by it, and torch then raises in the training,
wherever that is.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch.utils.data._utils.signal_handling as _signal_handling

_RUNS, _ASKED, _OVER = 0, 1, 2  # what the training does: trains; was asked to stop, too; has left its loop
_SECONDS = 1.0  # that a worker waits to see whether the training was asked to stop, too
_ENDING_SECONDS = 2.0

_state: mmap.mmap | None = None  # one byte that this process shares with its forks
_owner = 0  # the process whose it is: a rank that was forked has one of its own


def training_stops() -> None:
    """The training was asked to stop; from its own signal handler."""
    if _state is not None:
        _state[0] = _ASKED


@contextlib.contextmanager
def ignoring_sigterm() -> Iterator[None]:
    """While this lasts, workers that are forked do not end by a SIGTERM that the training gets as well."""
    global _state, _owner
    if _state is None or _owner != os.getpid():
        _state, _owner = mmap.mmap(-1, 1), os.getpid()
        atexit.register(_end_workers, _owner)
    state, state[0] = _state, _RUNS
    room: Any = _signal_handling
    plain = room._set_worker_signal_handlers  # called by a worker when it starts

    def set_handlers() -> None:
        plain()
        signal.signal(signal.SIGTERM, lambda number, frame: _terminated(state, number, frame))

    room._set_worker_signal_handlers = set_handlers
    try:
        yield
    finally:
        room._set_worker_signal_handlers = plain
        state[0] = _OVER


def _terminated(state: mmap.mmap, number: int, frame: FrameType | None) -> None:
    """In a worker: end, unless the training that was asked to stop will end it."""
    end = time.monotonic() + _SECONDS
    while state[0] != _ASKED:
        if state[0] == _OVER or time.monotonic() > end:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        time.sleep(0.01)


def _end_workers(owner: int) -> None:
    """At exit: end workers, also where they hang in native code and run no handler; multiprocessing waits for them."""
    if os.getpid() != owner:
        return
    workers = [one for one in multiprocessing.active_children() if one.daemon]
    for worker in workers:
        worker.terminate()
    end = time.monotonic() + _ENDING_SECONDS
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()))
        if worker.is_alive():
            worker.kill()
