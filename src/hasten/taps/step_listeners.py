"""Call listeners at the end of steps.

A call takes about 2 us in a training loop, so each listener says at which step it wants to be called next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

NEVER = sys.maxsize
"""What a listener returns to be called no more, except by `call_soon`."""

Listener = Callable[[int], int | None]
"""Called with the number of finished steps; returns the number at which to be called next, None for the next step."""


@dataclass(slots=True)
class _Entry:
    at: int
    listener: Listener


class StepListeners:
    """Calls listeners between two steps: after a step, before the next batch is asked for."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._soon: list[Listener] = []
        self._next = NEVER

    def add(self, listener: Listener, at: int = 1) -> None:
        """Call a listener once `at` steps are over."""
        self._entries.append(_Entry(at, listener))
        self._next = min(self._next, at)

    def call_soon(self, listener: Listener) -> None:
        """Call a listener at the end of the current step, even if it asked for a later one. Thread-safe."""
        self._soon.append(listener)
        self._next = 0

    def keep_only(self, *listeners: Listener) -> None:
        """Drop all other listeners."""
        self._entries = [entry for entry in self._entries if entry.listener in listeners]

    def restart(self) -> None:
        """Call every listener at the end of the next step: the steps are counted from 0 again."""
        for entry in self._entries:
            entry.at = 1
        self._next = 0

    def __call__(self, steps: int) -> None:
        """Call the listeners that are due after this many steps."""
        if steps < self._next:
            return
        self._next = NEVER  # set before the loop: a `call_soon` from another thread during it counts for the next step
        for entry in list(self._entries):
            called_soon = entry.listener in self._soon
            if called_soon:
                self._soon.remove(entry.listener)
            if called_soon or steps >= entry.at:
                at = entry.listener(steps)
                entry.at = steps + 1 if at is None else at
        self._next = min([self._next, *(entry.at for entry in self._entries)])
