"""Times the batches of an attempt."""

from __future__ import annotations

import time
from typing import Any

import torch

from hasten.trainer.callbacks.base import Callback

BATCHES = 8
"""Batches of a pass."""
PASSES = 3
"""The first one is warm-up."""


class Clock(Callback):
    """Times batches, passes apart from validations, and ends a fit that takes too long.

    Attributes:
        seconds: Of a batch, in the best pass; 0 until one was over behind the first.
    """

    def __init__(self, timeout: float) -> None:
        self.seconds = 0.0
        self._until = time.monotonic() + timeout
        self._began = 0.0
        self._pass = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """The clock of a pass runs from its second batch, where there is one: the first waits for workers."""
        if batch_idx <= 1:
            _wait_for(trainer)
            self._began, self._first = time.perf_counter(), batch_idx

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A batch is over."""
        self._last = batch_idx
        if time.monotonic() > self._until:
            trainer.should_stop = True
        if trainer.engine.loop.last or batch_idx + 1 == BATCHES:
            _wait_for(trainer)
            self._ended = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """A pass is over; the first of them was warm-up."""
        self._pass += 1
        if self._pass > 1 and not trainer.should_stop:
            seconds = (self._ended - self._began) / (self._last - self._first + 1)
            self.seconds = min(self.seconds or seconds, seconds)


def _wait_for(trainer: Any) -> None:
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
