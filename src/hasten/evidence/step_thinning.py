"""Keep all steps of a short run and a sample of those of a long run, so that memory stays bounded."""

from __future__ import annotations

import copy
from bisect import bisect_left
from random import Random
from typing import Any

from hasten.evidence.schema import ASIDE, Phase


class KeptSteps:
    """The kept steps of a run.

    The run is divided into groups of `every` consecutive steps, and one step of each group is kept. Once `most` steps
    are kept, groups are joined in pairs, and one step of each pair is dropped. The kept step of a group is drawn at
    random: at a fixed position it would always, or never, be one with a periodic cost (such as the batches of the
    slowest of four workers). The run's first step is always kept.

    Args:
        most: The most steps to keep; an even number.

    Attributes:
        numbers: Number (from 0) of each kept step.
        start: When each kept step began.
        phases: Seconds of each kept step by `Phase`.
        losses: Losses of each kept step: what `backward` was called on, unread.
        every: Number of steps in a group.
        next: Number of the next step that will be kept.
        aside: Seconds by `Phase` of validation and checkpoints in the steps that are not kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._random = Random(0)  # separate from the global generator, whose state belongs to the script
        self.numbers: list[int] = []
        self.start: list[float] = []
        self.phases: list[list[float]] = []
        self.losses: list[list[Any]] = []
        self.every = 1
        self.next = 0
        self.aside = [0.0] * len(Phase)

    def add(self, number: int, start: float, phases: list[float], losses: list[Any]) -> None:
        """Add a finished step: keep it if it is the one drawn from its group."""
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
        """Add the validation and checkpoint seconds of steps that are not kept to `aside`."""
        for phase in ASIDE:
            self.aside[phase] += phases[phase]

    def replace_times(self, number: int, start: float, phases: list[float]) -> None:
        """Replace a step's times by those of a better clock; nothing happens if the step is not kept."""
        if (index := self.index_of(number)) is not None:
            self.start[index] = start
            self.phases[index] = phases

    def index_of(self, number: int) -> int | None:
        """Return a step's index among the kept steps; None if it is not kept."""
        index = bisect_left(self.numbers, number)
        return index if index < len(self.numbers) and self.numbers[index] == number else None

    def read_losses(self) -> list[float | None]:
        """Return the sum of each kept step's losses, None for a step without; reads the device once for all of them."""
        import torch

        sums = [
            torch.stack([loss.float().mean() for loss in losses]).sum() if losses else None for losses in self.losses
        ]
        present = [value for value in sums if value is not None]
        values = iter(torch.stack([value.cpu() for value in present]).tolist() if present else ())
        return [None if value is None else next(values) for value in sums]

    def so_far(self) -> KeptSteps:
        """Return a copy of the steps until now, which further steps do not change."""
        copied = copy.copy(self)
        copied.numbers, copied.start, copied.losses = list(self.numbers), list(self.start), list(self.losses)
        copied.phases, copied.aside = list(self.phases), list(self.aside)
        return copied

    def fields(self) -> dict[str, Any]:
        """Return the evidence's fields with the kept steps, except losses (see `read_losses`)."""
        return {
            "step_start": tuple(self.start),
            "step_phases": tuple(map(tuple, self.phases)),
            "numbers": () if self.every == 1 else tuple(self.numbers),
            "every": self.every,
            "aside": tuple(self.aside) if any(self.aside) else (),
        }

    def _thin_out(self) -> None:
        """Join groups in pairs, and keep one step of each pair; the run's first step, a special one, always stays."""
        kept = [0, *(first + self._random.getrandbits(1) for first in range(2, len(self.numbers), 2))]
        for index in set(range(len(self.numbers))).difference(kept):
            self.put_aside(self.phases[index])
        self.numbers = [self.numbers[index] for index in kept]
        self.start = [self.start[index] for index in kept]
        self.phases = [self.phases[index] for index in kept]
        self.losses = [self.losses[index] for index in kept]
        self.every *= 2
