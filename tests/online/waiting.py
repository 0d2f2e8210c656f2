"""A clock for trainings that wait and compute little: their CPU time, and the seconds that they say they wait.

Nobody really waits. Whatever else the machine does is not on this clock, so that a search decides the same on a
machine that others load; and it takes a part of the time.
"""

from __future__ import annotations

import time

_waited = 0.0


def wait(seconds: float) -> None:
    """Let seconds pass on the clock."""
    global _waited
    _waited += max(0.0, seconds)


def start() -> None:
    """Make it the clock by which hasten measures steps in this process, before hasten's taps are imported."""
    time.perf_counter = _seconds


def _seconds() -> float:
    return time.process_time() + _waited
