"""Drives a recorder as a script would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hasten.evidence import PHASES, Phase
from hasten.evidence.open_pass import OpenPass
from hasten.evidence.recorder import Recorder


class Batches:
    """An iterator of a loader, as far as the recorder cares."""


class Script:
    """Drives a recorder as a script would, on a clock of its own."""

    def __init__(self) -> None:
        self.time = 100.0
        self.ends: list[float] = []
        self.began: list[bool] = []
        self.recorder = Recorder(now=lambda: self.time, on_step=self._step, on_pass=self._pass)

    def _step(self, steps: int) -> None:
        self.ends.append(self.time)
        assert steps == len(self.ends)

    def _pass(self, opened: OpenPass, began: bool) -> None:
        self.began.append(began)

    def begin(self, loader: int = 0, seconds: float = 0.25) -> Batches:
        iterator, start = Batches(), self.time
        self.time += seconds
        self.recorder.pass_begins(loader, iterator, start, self.time)
        return iterator

    def next(self, iterator: Batches, seconds: float = 1.0) -> None:
        start = self.time
        self.recorder.batch_requested(iterator, start)
        self.time += seconds
        self.recorder.batch_received(iterator, start, self.time)

    def end(self, iterator: Batches, seconds: float = 0.0) -> None:
        self.recorder.batch_requested(iterator, self.time)
        self.time += seconds
        self.recorder.exhausted(iterator, self.time)

    def batches(self, count: int, loader: int = 0, data: float = 1.0) -> Iterator[int]:
        iterator = self.begin(loader)
        for number in range(count):
            self.next(iterator, data)
            yield number
        self.end(iterator)

    def part(self, phase: Phase, seconds: float = 1.0) -> None:
        self.time += seconds
        self.recorder.add(phase, seconds)

    def backward(self, loss: Any = 0.5, seconds: float = 4.0) -> None:
        self.time += seconds
        self.recorder.backward(seconds, [loss])

    def step(self, optimizer: int = 1, seconds: float = 2.0, closures: int = 0) -> None:
        start, before = self.time, self.recorder.optimizer_begins()
        for _ in range(closures):
            self.part(Phase.FORWARD, 3.0)
            self.backward()
        self.time += seconds
        self.recorder.optimizer_step(optimizer, start, self.time, before)

    def train(self, loss: Any = 0.5) -> None:
        """One plain batch: 10 seconds behind the data, one of which is nobody's."""
        self.part(Phase.FORWARD, 3.0)
        self.backward(loss)
        self.step()
        self.time += 1.0

    def steps(self) -> list[dict[str, float]]:
        """What was recorded, phases that took no time left out."""
        return [
            {name: seconds for name, seconds in zip(PHASES, phases, strict=True) if seconds}
            for phases in self.recorder.kept.phases
        ]
