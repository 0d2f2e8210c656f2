"""Whose steps are the run's, in a script that draws from no DataLoader and has several optimizers."""

from __future__ import annotations

STALE_AFTER = 50  # optimizer steps after which a loader, or an optimizer, that was not heard of is taken to be over


class StepMarker:
    """The first optimizer that steps, until it steps no more; then the one that does.

    Attributes:
        optimizer: Its number; None before any has stepped.
    """

    def __init__(self) -> None:
        self.optimizer: int | None = None
        self._others = 0  # steps of others since its last

    def counts(self, optimizer: int) -> bool:
        """Return whether this step of an optimizer is one of the run's."""
        self._others += 1
        if self.optimizer is None or self._others > STALE_AFTER:
            self.optimizer = optimizer
        if self.optimizer != optimizer:
            return False
        self._others = 0
        return True
