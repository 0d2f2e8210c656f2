"""Call listeners at the end of steps.

A call takes about 2 us in a training loop, so each listener says at which step it wants to be called next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

NEVER = sys.maxsize
"""What a listener returns to be called no more, except by `hurry`."""

Listener = Callable[[int], int | None]
"""Called with the number of finished steps; returns the number at which to be called next, None for the next step."""


@dataclass(slots=True)
class _Waiting:
    at: int
    listener: Listener


class StepsOver:
    """Calls listeners between two steps: after a step, before the next batch is asked for."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self._hurried: list[Listener] = []
        self._next = NEVER

    def tell(self, listener: Listener, at: int = 1) -> None:
        """Call a listener once `at` steps are over."""
        self._waiting.append(_Waiting(at, listener))
        self._next = min(self._next, at)

    def hurry(self, listener: Listener) -> None:
        """Call a listener at the end of the current step, even if it asked for a later one. Thread-safe."""
        self._hurried.append(listener)
        self._next = 0

    def only(self, *listeners: Listener) -> None:
        """Drop all other listeners."""
        self._waiting = [waiting for waiting in self._waiting if waiting.listener in listeners]

    def restart(self) -> None:
        """Call every listener at the end of the next step: the steps are counted from 0 again."""
        for waiting in self._waiting:
            waiting.at = 1
        self._next = 0

    def __call__(self, steps: int) -> None:
        """Call the listeners that are due after this many steps."""
        if steps < self._next:
            return
        self._next = NEVER  # set before the loop: a `hurry` from another thread during it counts for the next step
        for waiting in list(self._waiting):
            hurried = waiting.listener in self._hurried
            if hurried:
                self._hurried.remove(waiting.listener)
            if hurried or steps >= waiting.at:
                at = waiting.listener(steps)
                waiting.at = steps + 1 if at is None else at
        self._next = min([self._next, *(waiting.at for waiting in self._waiting)])
