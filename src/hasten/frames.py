"""Read the stack frame of another thread, without the deadlock of Pythons before 3.12.3."""

from __future__ import annotations

import gc
import sys
from types import FrameType

# Before Python 3.12.3, `sys._current_frames()` can deadlock if a garbage collection runs inside it (CPython issue
# 106883). It holds the lock of the thread list. A finalizer that blocks, such as that of a DataLoader's iterator,
# releases the GIL; the next thread that starts or ends then holds the GIL and waits for the thread list.
_COLLECTS_INSIDE = sys.version_info < (3, 12, 3)


def frame_of(thread: int | None) -> FrameType | None:
    """Return a thread's current frame, given its `ident`; None if the thread has not started or has ended."""
    collects = _COLLECTS_INSIDE and gc.isenabled()
    if collects:
        gc.disable()
    try:
        return sys._current_frames().get(thread or 0)
    finally:
        if collects:
            gc.enable()
