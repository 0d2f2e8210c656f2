"""hasten's progress with the names that people read of Lightning's progress bars."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hasten.trainer.callbacks.progress import Progress


@dataclass(frozen=True)
class Bar:
    """A bar as far as it is read: how long it is and how far it has come; `total` is None where nobody knows."""

    n: int
    total: float | None


class BarProgress(Progress):
    """Show progress as hasten does, and answer what is asked of Lightning's `ProgressBar`."""

    _trainer: Any = None

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Remember whose progress it is."""
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
        """Batches of an epoch, up to what `max_steps` leaves of it."""
        trainer = self._trainer
        batches: float = trainer.num_training_batches
        if trainer.max_epochs in (-1, None) and trainer.max_steps != -1:  # the end of training comes first, if known
            return float(min(batches, trainer.max_steps * trainer.accumulate_grad_batches))
        return batches

    @property
    def total_val_batches_current_epoch(self) -> float:
        """Batches of a validation of this epoch."""
        trainer = self._trainer
        if trainer.sanity_checking:
            return float(sum(trainer.num_sanity_val_batches))
        return float(sum(trainer.num_val_batches)) if trainer.validates_this_epoch else 0

    @property
    def total_val_batches(self) -> float:
        """Batches of all validations of this epoch."""
        trainer = self._trainer
        if not trainer.validates_this_epoch:
            return 0
        often = 1
        every, batches = trainer.engine.val_check_batch, trainer.num_training_batches
        if trainer.check_val_every_n_epoch is not None and not math.isinf(every) and not math.isinf(batches):
            often = int(batches // every)
        return float(often * sum(trainer.num_val_batches))

    @property
    def total_test_batches_current_dataloader(self) -> float:
        """Batches of a test."""
        return float(sum(self._trainer.num_test_batches))

    @property
    def train_progress_bar(self) -> Bar:
        """How far training is within its epoch."""
        return self._bar(self._trainer.progress.batch_idx, self.total_train_batches)

    @property
    def val_progress_bar(self) -> Bar:
        """How far validation is."""
        return self._bar(self._trainer.progress.evaluated_batches, self.total_val_batches_current_epoch)

    def _bar(self, done: int, total: float) -> Bar:
        return Bar(done, None if math.isinf(total) else total)
