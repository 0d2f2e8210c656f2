"""Parts of the recorder: an open pass through a loader, phases that add up to a step, and which optimizer counts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from hasten.evidence.schema import Pass, Phase

STALE_AFTER = 50  # optimizer steps after which a loader or an optimizer that is no longer used counts as finished
BLANK = (0.0,) * len(Phase)
"""Seconds by `Phase` of a step that has just begun."""


def adding_up(phases: list[float], total: float) -> list[float]:
    """Return phases that add up to the step's total seconds: the rest goes to OTHER.

    If they exceed the total (a part of the step was counted inside a validation pass that began before it), validation
    is reduced first, then all phases in proportion.
    """
    excess = sum(phases) - total
    if excess <= 0:
        phases[Phase.OTHER] -= excess
        return phases
    reduced = min(excess, phases[Phase.VALIDATION])
    phases[Phase.VALIDATION] -= reduced
    remaining = sum(phases)
    return [phase * total / remaining for phase in phases] if excess > reduced and remaining > 0 else phases


class OpenPass:
    """A pass through a loader that is not over, and its current step.

    Attributes:
        loader: Number of the loader; -1 for steps outside every loader.
        iterator: Returns the pass's iterator; None once it was deleted.
        start: When `iter(loader)` was called.
        opened: When `iter(loader)` returned.
        first: When the first batch came.
        outer: The pass in whose step this pass began.
        batches: Batches so far.
        trained: Whether it contained a backward or an optimizer step.
        ended: Whether it is over.
        step_start: When the current step began; None between steps.
        phases: Seconds of the current step, by `Phase`.
        losses: Losses of the current step.
        optimizer_steps: Optimizer steps since its last batch was asked for.
    """

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
        self.stepped: set[int] = set()  # optimizers that stepped since its iterator was deleted
        self.rest_length = 0  # steps of the recorder's current rest
        self.rest_remaining = 0  # steps of that rest that have not begun yet

    def ended_at(self, at: float, origin: float) -> Pass:
        """Return the finished pass; its times are on the run's clock, which was 0 at `origin`."""
        start, first, opened = self.start - origin, self.first - origin, self.opened - origin
        return Pass(self.loader, start, first, at - origin, self.batches, self.trained, opened)


def first_step_so_far(inner: OpenPass, at: float) -> list[float]:
    """Return the phases of an unfinished step that has trained already; [] if there is none.

    Args:
        inner: The recorder's current pass.
        at: The time now, on the recorder's clock.
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
    """Chooses the optimizer whose steps are the run's steps, if no DataLoader is used: the first one, while it steps.

    Attributes:
        optimizer: The chosen optimizer's id; None before any has stepped.
    """

    def __init__(self) -> None:
        self.optimizer: int | None = None
        self._other_steps = 0  # steps of other optimizers since its last one

    def counts(self, optimizer: int) -> bool:
        """Register a step of an optimizer; return whether it counts as a step of the run."""
        self._other_steps += 1
        if self.optimizer is None or self._other_steps > STALE_AFTER:
            self.optimizer = optimizer
        if self.optimizer != optimizer:
            return False
        self._other_steps = 0
        return True
