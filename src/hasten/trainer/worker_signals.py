"""Keeps DataLoader workers alive when SIGTERM reaches all processes of a training, until the training has saved.

SLURM and `kill -- -PGID` send SIGTERM to all processes. A torch worker then exits, and torch raises in the training at
an arbitrary point. Here a worker that gets SIGTERM waits a second to see, in a shared byte, whether the training got it
too: if so it stays, and the training ends it; if not, the signal was for the worker alone, and it exits.
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

_RUNS, _STOPPING, _OVER = 0, 1, 2  # state of the training: running; asked to stop; loop left
_SECONDS = 1.0  # how long a worker waits to see whether the training was asked to stop too
_ENDING_SECONDS = 2.0

_state: mmap.mmap | None = None  # one byte, shared with forked workers
_owner = 0  # the process that made `_state`: a forked rank makes another


def training_stops() -> None:
    """Note that the training was asked to stop; called in its signal handler."""
    if _state is not None:
        _state[0] = _STOPPING


@contextlib.contextmanager
def ignoring_sigterm() -> Iterator[None]:
    """Make workers that are forked in this context survive a SIGTERM that the training gets as well."""
    global _state, _owner
    if _state is None or _owner != os.getpid():
        _state, _owner = mmap.mmap(-1, 1), os.getpid()
        atexit.register(_end_workers, _owner)
    state, state[0] = _state, _RUNS
    handling: Any = _signal_handling
    plain = handling._set_worker_signal_handlers  # a worker calls it when it starts

    def set_handlers() -> None:
        plain()
        signal.signal(signal.SIGTERM, lambda number, frame: _terminated(state, number, frame))

    handling._set_worker_signal_handlers = set_handlers
    try:
        yield
    finally:
        handling._set_worker_signal_handlers = plain
        state[0] = _OVER


def _terminated(state: mmap.mmap, number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM in a worker: exit, unless the training was asked to stop too and will end the worker."""
    end = time.monotonic() + _SECONDS
    while state[0] != _STOPPING:
        if state[0] == _OVER or time.monotonic() > end:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        time.sleep(0.01)


def _end_workers(owner: int) -> None:
    """End workers at exit, even workers that hang in native code: multiprocessing would wait for them forever."""
    if os.getpid() != owner:
        return
    workers = [child for child in multiprocessing.active_children() if child.daemon]
    for worker in workers:
        worker.terminate()
    end = time.monotonic() + _ENDING_SECONDS
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()))
        if worker.is_alive():
            worker.kill()
