"""Progress: every counter of a training in one place, saved and restored together."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

_SAVED = ("point", "current_epoch", "epochs_processed", "batch_idx", "total_batches", "logged_steps")


@dataclass
class Progress:
    """Counters of a Trainer, over all its runs.

    Attributes:
        current_epoch: Number of finished epochs.
        epochs_processed: Number of epochs whose batches are done; end hooks of the last of them may still be running.
        global_step: Number of optimizer steps.
        total_batches: Number of training batches, over all epochs.
        logged_steps: Number of training batches with an optimizer step: the x-axis of logged values.
        batch_idx: Number of training batches done in the current epoch.
        point: How far the current batch or epoch is ("epoch_start", "batch", "batch_end", "validated", "between",
            "epoch_end"): where a run resumes from a checkpoint saved now.
        evaluated_batches: Number of batches of the current or last evaluation.
        microbatch: Number of samples computed at a time, as `microbatch="auto"` found; None: whole batches. Saved if
            it is known.
        batches_seen: Numbers of evaluation batches by run and kind ("fit_validate"), then by loader: the x-axis of
            values logged in evaluations.
        should_stop: Whether training is to end after this batch. Not saved: it concerns this run only.
    """

    current_epoch: int = 0
    epochs_processed: int = 0
    global_step: int = 0
    total_batches: int = 0
    logged_steps: int = 0
    batch_idx: int = 0
    point: str = "epoch_start"
    evaluated_batches: int = 0
    microbatch: int | None = None
    batches_seen: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    should_stop: bool = False

    def begin_fit(self) -> None:
        """Move to the start of the next epoch, even if the previous fit ended within an epoch."""
        self.epochs_processed, self.batch_idx, self.point = self.current_epoch, 0, "epoch_start"
        self.microbatch = None

    def state_dict(self) -> dict[str, Any]:
        """Return the counters that a checkpoint holds in addition to `epoch` and `global_step`."""
        microbatch = {} if self.microbatch is None else {"microbatch": self.microbatch}
        return {name: getattr(self, name) for name in _SAVED} | microbatch

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a checkpoint's counters; `enter_epoch` later restores the position within the epoch."""
        self.begin_fit()
        self.microbatch = saved.get("microbatch")
        for name in ("current_epoch", "epochs_processed", "total_batches", "logged_steps"):
            setattr(self, name, saved[name])
        self.batches_seen["fit_validate"] = Counter(dict(saved["validated"]))

    def enter_epoch(self, saved: dict[str, Any]) -> None:
        """Restore the position within the epoch, when the loaders are about to resume there."""
        self.batch_idx, self.point = saved["batch_idx"], saved["point"]

    def validated(self) -> list[list[int]]:
        """Return the number of batches seen in validations within `fit`, by loader, in a checkpoint's format."""
        return sorted(map(list, self.batches_seen["fit_validate"].items()))

    def take(self, source: Progress) -> None:
        """Copy the counters of a run in another process."""
        vars(self).update(vars(source))
