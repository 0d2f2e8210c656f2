"""Process-wide settings of torch, changed for a training and put back behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Switches:
    """Remembers what settings were before."""

    def __init__(self) -> None:
        self._changed: list[tuple[Callable[[], Any], Callable[[Any], Any], Any, Any]] = []

    def set(self, read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> None:
        """Set one to a value."""
        before = read()
        write(value)
        self._changed.append((read, write, before, read()))

    def put_back(self) -> None:
        """Set all to what they were, but for those that somebody else has changed since."""
        while self._changed:
            read, write, before, ours = self._changed.pop()
            if read() == ours:
                write(before)
