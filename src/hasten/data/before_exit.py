"""Lets threads finish what they do before Python ends.

A daemon thread that wants the GIL once Python is ending is ended there. In C++ (torch, pyarrow) that is an exception
which nobody may catch, so the whole process aborts: "terminate called without an active exception", exit code 134.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref

_PATIENCE = 10.0  # seconds that the end of Python waits, for all threads together: one may hang
_busy: weakref.WeakSet[threading.Lock] = weakref.WeakSet()
_hooked = False


def busy() -> threading.Lock:
    """Return a lock for a daemon thread to hold while it works; when Python ends, it begins nothing more."""
    global _hooked
    if not _hooked:
        _hooked = True
        atexit.register(_wait)
        os.register_at_fork(after_in_child=_busy.clear)  # it has no such threads
    lock = threading.Lock()
    _busy.add(lock)
    return lock


def _wait() -> None:
    until = time.monotonic() + _PATIENCE
    for lock in list(_busy):
        lock.acquire(timeout=max(0.0, until - time.monotonic()))  # and kept
