"""Where another thread is."""

from __future__ import annotations

import gc
import sys
from types import FrameType

# Before 3.12.3 a garbage collection inside `sys._current_frames()` can end in a deadlock (CPython issue 106883): it
# holds the lock of the list of threads, and a finalizer that waits (that of torch's loader does) lets others have the
# GIL, of which the first that begins or ends a thread waits for the list.
_COLLECTS_INSIDE = sys.version_info < (3, 12, 3)


def frame_of(thread: int | None) -> FrameType | None:
    """The frame that a thread is in, by its identity; None where it has ended, or has not begun."""
    collects = _COLLECTS_INSIDE and gc.isenabled()
    if collects:
        gc.disable()
    try:
        return sys._current_frames().get(thread or 0)
    finally:
        if collects:
            gc.enable()
