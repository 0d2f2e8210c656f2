"""Schedule: when ModelCheckpoint saves, by steps, epochs or minutes, and after which validation."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from hasten.errors import HastenError


class Schedule:
    """Decides when a checkpoint is due.

    Args:
        every_n_train_steps: Save after this many optimizer steps.
        every_n_epochs: Save after this many epochs; 1 if none of the three is given.
        train_time_interval: Save after this much time, at the end of a batch.
        save_on_train_epoch_end: Save at the end of the training epoch, not of validation; None: decided by when the
            Trainer validates.

    Raises:
        HastenError: One of them is negative, or more than one is given.
    """

    def __init__(
        self,
        every_n_train_steps: int | None,
        every_n_epochs: int | None,
        train_time_interval: timedelta | None,
        save_on_train_epoch_end: bool | None,
    ) -> None:
        by_default = every_n_train_steps is None and every_n_epochs is None and train_time_interval is None
        self.every_n_train_steps = every_n_train_steps or 0
        self.every_n_epochs = 1 if by_default else every_n_epochs or 0
        self.train_time_interval = train_time_interval
        self._save_on_train_epoch_end = save_on_train_epoch_end
        self._last_time_checked = time.monotonic()
        self._check()

    def _check(self) -> None:
        """Refuse negative values and more than one trigger."""
        triggers = {
            "every_n_train_steps": self.every_n_train_steps,
            "every_n_epochs": self.every_n_epochs,
            "train_time_interval": self.train_time_interval is not None,
        }
        for name, value in triggers.items():
            if value < 0:
                raise HastenError(f"ModelCheckpoint({name}={value}): must be 0 or more", "0 switches it off")
        active = [name for name, value in triggers.items() if value]
        if len(active) > 1:
            raise HastenError(
                f"ModelCheckpoint: {' and '.join(active)} exclude each other", "use one ModelCheckpoint for each"
            )

    @property
    def within_epochs(self) -> bool:
        """Whether a checkpoint may be due between two batches."""
        return bool(self.every_n_train_steps) or self.train_time_interval is not None

    def begin(self) -> None:
        """Start the time interval."""
        self._last_time_checked = time.monotonic()

    def is_due_after_batch(self, trainer: Any) -> bool:
        """Return whether a save by steps or time is due; the same answer on all ranks."""
        if self.every_n_train_steps:
            return bool(trainer.global_step % self.every_n_train_steps == 0)
        return self.train_time_interval is not None and self._time_is_up(trainer, self.train_time_interval)

    def _time_is_up(self, trainer: Any, interval: timedelta) -> bool:
        """Return whether the interval is over by rank 0's clock, and if so start the next one."""
        now = time.monotonic()
        due = now - self._last_time_checked >= interval.total_seconds()
        if not trainer.world.any(trainer.is_global_zero and due):  # ranks' clocks differ, so rank 0's decides
            return False
        self._last_time_checked = now
        return True

    def is_due_after_epoch(self, trainer: Any) -> bool:
        """Return whether a save is due after the current epoch."""
        return self.every_n_epochs > 0 and bool((trainer.current_epoch + 1) % self.every_n_epochs == 0)

    def saves_on_train_epoch_end(self, trainer: Any) -> bool:
        """Return whether to save at the end of the training epoch, not after validation."""
        if self._save_on_train_epoch_end is not None:
            return self._save_on_train_epoch_end
        if trainer.check_val_every_n_epoch != 1:
            return False
        return not _has_validation(trainer) or bool(trainer.val_check_interval == 1.0)

    def validation_comes_now(self, trainer: Any, batch_idx: int) -> bool:
        """Return whether a validation runs right after this batch.

        Until then, logged validation metrics are those of an earlier validation.
        """
        if self.saves_on_train_epoch_end(trainer) or batch_idx + 1 != trainer.num_training_batches:
            return False
        every = trainer.check_val_every_n_epoch
        return _has_validation(trainer) and (every is None or (trainer.current_epoch + 1) % every == 0)


def _has_validation(trainer: Any) -> bool:
    batches = trainer.num_val_batches
    return bool(sum(batches) if isinstance(batches, list) else batches)
