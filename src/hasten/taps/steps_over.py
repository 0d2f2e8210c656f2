"""Who is told that steps are over, and when: a call costs some 2 us in a training loop, so nobody is called in vain."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

NEVER = sys.maxsize
"""The answer of a listener that wants to hear no more, unless it is hurried."""

Listener = Callable[[int], int | None]
"""Is told how many steps are over; answers how many must be before it is told again, None: one more."""


@dataclass(slots=True)
class _Waiting:
    at: int
    listener: Listener


class StepsOver:
    """Tells listeners that steps are over, between two steps: before the next batch is asked for."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self._hurried: list[Listener] = []
        self._next = NEVER

    def tell(self, listener: Listener, at: int = 1) -> None:
        """Tell it when `at` steps are over."""
        self._waiting.append(_Waiting(at, listener))
        self._next = min(self._next, at)

    def hurry(self, listener: Listener) -> None:
        """Tell it at the end of the step that goes on, whatever it answered; from any thread."""
        self._hurried.append(listener)
        self._next = 0

    def only(self, *listeners: Listener) -> None:
        """Tell nobody else any more."""
        self._waiting = [waiting for waiting in self._waiting if waiting.listener in listeners]

    def restart(self) -> None:
        """Steps are counted from 0 again: tell everyone at the end of the first."""
        for waiting in self._waiting:
            waiting.at = 1
        self._next = 0

    def __call__(self, steps: int) -> None:
        """So many steps are over."""
        if steps < self._next:
            return
        self._next = NEVER  # whoever hurries from here on is heard at the next step
        for waiting in list(self._waiting):
            hurried = waiting.listener in self._hurried
            if hurried:
                self._hurried.remove(waiting.listener)
            if hurried or steps >= waiting.at:
                at = waiting.listener(steps)
                waiting.at = steps + 1 if at is None else at
        self._next = min([self._next, *(waiting.at for waiting in self._waiting)])
