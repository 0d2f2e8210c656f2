"""A pass through a loader that is still going on, what a step is made of, and whose steps count."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from hasten.evidence.schema import Pass, Phase

STALE_AFTER = 50  # optimizer steps after which a loader, or an optimizer, that was not heard of is taken to be over
BLANK = (0.0,) * len(Phase)
"""Seconds by `Phase` of a step that has just begun."""


def adding_up(phases: list[float], total: float) -> list[float]:
    """Phases that add up to the step: what is left is OTHER.

    Where they are more (a part of the step fell inside a validation pass that had begun before it), validation
    gives way first.
    """
    over = sum(phases) - total
    if over <= 0:
        phases[Phase.OTHER] -= over
        return phases
    given = min(over, phases[Phase.VALIDATION])
    phases[Phase.VALIDATION] -= given
    rest = sum(phases)
    return [phase * total / rest for phase in phases] if over > given and rest > 0 else phases


class OpenPass:
    """One time through a loader that is still going on, and the step it is in."""

    def __init__(self, loader: int, iterator: Any, start: float, outer: OpenPass | None) -> None:
        self.loader = loader
        self.iterator: Callable[[], Any] = weakref.ref(iterator) if iterator is not None else lambda: None
        self.start = start
        self.first = self.opened = start
        self.outer = outer
        self.batches = 0
        self.trained = False
        self.ended = False
        self.step_start: float | None = None
        self.phases = list(BLANK)
        self.losses: list[Any] = []
        self.optimizer_steps = 0
        self.stepped: set[int] = set()  # optimizers that stepped since its iterator was gone
        self.rests_for = 0  # steps, when the clock rests
        self.rest = 0  # of them not yet begun

    def ended_at(self, at: float, origin: float) -> Pass:
        """Return what is kept of it; times are on the run's clock, which stood at 0 at `origin`."""
        start, first, opened = self.start - origin, self.first - origin, self.opened - origin
        return Pass(self.loader, start, first, at - origin, self.batches, self.trained, opened)


def first_step_so_far(inner: OpenPass, at: float) -> list[float]:
    """Return the phases of a step that trained and is not over; nothing where none did.

    Args:
        inner: The pass that is worked on.
        at: The time by the recorder's clock.
    """
    opened: OpenPass | None = inner
    while opened is not None and not opened.phases[Phase.BACKWARD]:
        opened = opened.outer
    if opened is None:
        return []
    phases = list(opened.phases)
    if inner.outer is opened and not inner.trained:
        phases[Phase.VALIDATION] += at - inner.start
    return phases if opened.step_start is None else adding_up(phases, at - opened.step_start)


class StepMarker:
    """Which optimizer's steps are the run's, where no DataLoader is drawn from: the first one's, while it steps.

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
