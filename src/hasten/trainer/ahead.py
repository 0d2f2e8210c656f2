"""Ahead: knows the last batch of a loader that has no length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hasten.data import rng


class Ahead:
    """Look one batch ahead, so that the last one is known."""

    def __init__(self, fetch: Callable[[], Any]) -> None:
        self._fetch = fetch
        self._next: list[Any] = []
        self.over = False
        self.before: dict[str, Any] | None = None  # the random state before the batch that is held was drawn

    def hold(self) -> None:
        """Draw the batch to come."""
        self.before = rng.state()
        try:
            self._next = [self._fetch()]
        except StopIteration:
            self._next, self.over = [], True

    def fetch(self) -> Any:
        """The next batch."""
        if not self._next and not self.over:
            self.hold()
        if not self._next:
            raise StopIteration
        batch = self._next.pop()
        self.hold()
        return batch

    def let_go(self) -> None:
        """Drop the pass and the batch that is held."""
        self._fetch, self._next = nothing_left, []


def nothing_left() -> Any:
    """Be a pass that is over."""
    raise StopIteration
