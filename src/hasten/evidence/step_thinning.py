"""Keeps all steps of a short run, and ever fewer of a long one, so that memory stays bounded."""

from __future__ import annotations

import copy
from bisect import bisect_left
from random import Random
from typing import Any

from hasten.evidence.schema import ASIDE, Phase


class KeptSteps:
    """The steps of a run that are kept.

    The run is divided into groups of `every` steps that follow each other, and one step of each group is kept. With
    `most` kept, groups are joined in pairs. Which one of a group is kept is drawn by lot: a fixed one would see
    always, or never, what comes back every so many steps (the batches of the slowest of four workers). The run's
    first step is always kept.

    Args:
        most: So many at the most; an even number.

    Attributes:
        numbers: Number (from 0) of each kept step.
        start: When each began.
        phases: Seconds of each by `Phase`.
        losses: Of each, what `backward` was called on (unread).
        every: How many steps a group has.
        next: Number of the next step that will be kept.
        aside: Seconds by `Phase` of validation and checkpoints in the steps that are not kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._random = Random(0)  # of its own: the script's is not touched
        self.numbers: list[int] = []
        self.start: list[float] = []
        self.phases: list[list[float]] = []
        self.losses: list[list[Any]] = []
        self.every = 1
        self.next = 0
        self.aside = [0.0] * len(Phase)

    def add(self, number: int, start: float, phases: list[float], losses: list[Any]) -> None:
        """A step is over: keep it, if it is the one."""
        if number < self.next:
            self.put_aside(phases)
            return
        self.numbers.append(number)
        self.start.append(start)
        self.phases.append(phases)
        self.losses.append(losses)
        if len(self.numbers) >= self._most:
            self._thin_out()
        every = self.every
        self.next = number + 1 if every == 1 else (number // every + 1) * every + self._random.randrange(every)

    def put_aside(self, phases: list[float]) -> None:
        """Steps are not kept: what is measured in all of them is added up."""
        for phase in ASIDE:
            self.aside[phase] += phases[phase]

    def measured(self, number: int, start: float, phases: list[float]) -> None:
        """A step was measured by a better clock; nothing happens if it is not kept."""
        if (index := self.index_of(number)) is not None:
            self.start[index] = start
            self.phases[index] = phases

    def index_of(self, number: int) -> int | None:
        """Return where this step is among those that are kept."""
        index = bisect_left(self.numbers, number)
        return index if index < len(self.numbers) and self.numbers[index] == number else None

    def read_losses(self) -> list[float | None]:
        """Sum of each kept step's losses, None where there are none; one read of the device for all of them."""
        import torch

        sums = [
            torch.stack([loss.float().mean() for loss in losses]).sum() if losses else None for losses in self.losses
        ]
        present = [value for value in sums if value is not None]
        values = iter(torch.stack([value.cpu() for value in present]).tolist() if present else ())
        return [None if value is None else next(values) for value in sums]

    def so_far(self) -> KeptSteps:
        """The steps until now, which stay as they are when others come."""
        other = copy.copy(self)
        other.numbers, other.start, other.losses = list(self.numbers), list(self.start), list(self.losses)
        other.phases, other.aside = list(self.phases), list(self.aside)
        return other

    def fields(self) -> dict[str, Any]:
        """The fields of the evidence that say what is kept, but for losses (see `read_losses`)."""
        return {
            "step_start": tuple(self.start),
            "step_phases": tuple(map(tuple, self.phases)),
            "numbers": () if self.every == 1 else tuple(self.numbers),
            "every": self.every,
            "aside": tuple(self.aside) if any(self.aside) else (),
        }

    def _thin_out(self) -> None:
        """Join groups in pairs; the run's first step, which is like no other, always stays."""
        stay = [0, *(first + self._random.getrandbits(1) for first in range(2, len(self.numbers), 2))]
        for index in set(range(len(self.numbers))).difference(stay):
            self.put_aside(self.phases[index])
        self.numbers = [self.numbers[index] for index in stay]
        self.start = [self.start[index] for index in stay]
        self.phases = [self.phases[index] for index in stay]
        self.losses = [self.losses[index] for index in stay]
        self.every *= 2
