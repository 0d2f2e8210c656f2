"""hasten's progress display with the attributes that users read from Lightning's progress bars."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hasten.trainer.callbacks.progress import Progress


@dataclass(frozen=True)
class Bar:
    """The attributes of a bar that are read: batches done, and their total (None if unknown)."""

    n: int
    total: float | None


class BarProgress(Progress):
    """hasten's progress display, with the attributes of Lightning's `ProgressBar`."""

    _trainer: Any = None

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Keep the trainer for the attributes below."""
        self._trainer = trainer
        super().setup(trainer, module, stage)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trainer": None}

    @property
    def trainer(self) -> Any:
        """The trainer."""
        return self._trainer

    @property
    def total_train_batches(self) -> float:
        """Batches of an epoch, or up to the step at which `max_steps` ends it."""
        trainer = self._trainer
        batches: float = trainer.num_training_batches
        if trainer.max_epochs in (-1, None) and trainer.max_steps != -1:  # only max_steps ends training
            return float(min(batches, trainer.max_steps * trainer.accumulate_grad_batches))
        return batches

    @property
    def total_val_batches_current_epoch(self) -> float:
        """Batches of one validation in this epoch."""
        trainer = self._trainer
        if trainer.sanity_checking:
            return float(sum(trainer.num_sanity_val_batches))
        return float(sum(trainer.num_val_batches)) if trainer.validates_this_epoch else 0

    @property
    def total_val_batches(self) -> float:
        """Batches of all validations in this epoch."""
        trainer = self._trainer
        if not trainer.validates_this_epoch:
            return 0
        validations = 1
        every, batches = trainer.engine.val_check_batch, trainer.num_training_batches
        if trainer.check_val_every_n_epoch is not None and not math.isinf(every) and not math.isinf(batches):
            validations = int(batches // every)
        return float(validations * sum(trainer.num_val_batches))

    @property
    def total_test_batches_current_dataloader(self) -> float:
        """Batches of a test."""
        return float(sum(self._trainer.num_test_batches))

    @property
    def train_progress_bar(self) -> Bar:
        """Progress of training within its epoch."""
        return self._bar(self._trainer.progress.batch_idx, self.total_train_batches)

    @property
    def val_progress_bar(self) -> Bar:
        """Progress of validation."""
        return self._bar(self._trainer.progress.evaluated_batches, self.total_val_batches_current_epoch)

    def _bar(self, count: int, total: float) -> Bar:
        """Return a bar; an infinite total becomes None."""
        return Bar(count, None if math.isinf(total) else total)
