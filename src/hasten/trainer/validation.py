"""Validation within `fit`: when it is due, how it runs, and its state for a checkpoint."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from hasten.data import rng
from hasten.trainer import evaluate, feeding

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer


class Validation:
    """Runs validation between the training steps of one `fit`.

    Args:
        trainer: The Trainer.
        positions: Positions of the validation loaders to resume from; None: their start.

    Attributes:
        enabled: Whether validation may run in the current epoch.
    """

    def __init__(self, trainer: Trainer, positions: list[Any] | None) -> None:
        self._trainer = trainer
        self._engine = trainer.engine
        self._positions = positions
        self._state_before: dict[str, Any] = {}  # while a validation runs: the state for checkpoints in it
        self.enabled = False
        self.restart_clock()

    def restart_clock(self) -> None:
        """Restart a `val_check_interval` given as a duration."""
        self._last_run = time.monotonic()

    def is_due(self, batch_idx: int, last: bool, stops: bool) -> bool:
        """Return whether to validate after a training batch.

        Args:
            batch_idx: The batch's number within the epoch.
            last: Whether it is the epoch's last batch.
            stops: Whether training ends with it.
        """
        engine, config = self._engine, self._trainer.config
        unknown = engine.val_check_batch == math.inf and engine.val_check_seconds is None
        if stops or (last and unknown):
            return True
        if engine.val_check_seconds is not None:
            return time.monotonic() - self._last_run >= engine.val_check_seconds
        if unknown:
            limit = config.limit_train_batches
            return isinstance(limit, int) and (batch_idx + 1) % limit == 0
        over_epochs = config.check_val_every_n_epoch is None
        count = self._trainer.progress.total_batches if over_epochs else batch_idx + 1
        return bool(count % engine.val_check_batch == 0)

    def run(self) -> None:
        """Run one validation; request its loaders first where that is due."""
        trainer, engine = self._trainer, self._engine
        feed = engine.feeds["val"]
        if feed.source is None or engine.reload_is_due("val"):
            feeding.setup(trainer, "val")
        self._begin()
        if sum(feed.limits):
            training = engine.board
            board = engine.board = engine.new_board(training=False)
            trainer.stage.stage = "validate"
            with evaluate.without_gradients(False):
                evaluate.evaluate(trainer, engine.hooks, board, feed.source, feed.limits, "validate", self._end)
            trainer.stage.stage = "train"
            engine.board = training
        self._end()
        self.restart_clock()

    def _begin(self) -> None:
        """Store the state before this validation: a run that resumes within a validation repeats all of it."""
        resumed, self._positions = self._positions, None
        for position, state in zip(self._engine.feeds["val"].source.positions, resumed or [], strict=False):
            position.resume(state)
        self._state_before = {}  # so that `state_dict` returns the current state
        self._state_before = self.state_dict()

    def _end(self) -> None:
        """Mark the validation as done, before its last hooks: a checkpoint saved in them does not repeat it."""
        self._state_before = {}
        self._trainer.progress.point = "validated"

    def state_dict(self) -> dict[str, Any]:
        """Return random states, counters and loader positions: now, or from before the validation that is running."""
        if self._state_before:
            return self._state_before
        source, positions = self._engine.feeds["val"].source, self._positions
        if positions is None and source is not None:
            positions = [position.state_dict(0) for position in source.positions]
        return {"rng": rng.state(), "validated": self._trainer.progress.validated(), "val_positions": positions}
