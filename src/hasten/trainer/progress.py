"""Progress: how far a training is. Every counter stands here, and is saved and restored with the others."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

_SAVED = ("point", "current_epoch", "epochs_processed", "batch_idx", "total_batches", "logged_steps")


@dataclass
class Progress:
    """Counters of a Trainer, over all its runs.

    Attributes:
        current_epoch: Epochs that are over.
        epochs_processed: Epochs whose batches are done; the hooks of the last one's end may still run.
        global_step: Optimizer steps.
        total_batches: Training batches.
        logged_steps: Training batches with an optimizer step: the x-axis of what loggers get.
        batch_idx: Training batches of the current epoch.
        point: How far the current batch or epoch is ("epoch_start", "batch", "batch_end", "validated", "between",
            "epoch_end"): where a checkpoint saved now goes on.
        evaluated_batches: Batches of the evaluation that runs, or was the last.
        microbatch: Samples that are computed at a time, as `microbatch="auto"` found; None: whole batches. Saved where
            it is known.
        batches_seen: Evaluation batches by run and kind ("fit_validate"), then by loader: the x-axis of what is logged
            in evaluations.
        should_stop: Whether somebody wants the training to end after this batch. Not saved: it is a wish of this run.
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
        """Stand at the beginning of the next epoch, whatever the fit before left within one."""
        self.epochs_processed, self.batch_idx, self.point = self.current_epoch, 0, "epoch_start"
        self.microbatch = None

    def state_dict(self) -> dict[str, Any]:
        """Return the counters that a checkpoint has beside `epoch` and `global_step`."""
        found = {} if self.microbatch is None else {"microbatch": self.microbatch}
        return {name: getattr(self, name) for name in _SAVED} | found

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on after the epochs and batches of a checkpoint; where in its epoch that was says `enter_epoch`."""
        self.begin_fit()
        self.microbatch = saved.get("microbatch")
        for name in ("current_epoch", "epochs_processed", "total_batches", "logged_steps"):
            setattr(self, name, saved[name])
        self.batches_seen["fit_validate"] = Counter(dict(saved["validated"]))

    def enter_epoch(self, saved: dict[str, Any]) -> None:
        """Stand where the checkpoint was saved: its epoch's loaders are about to go on from there."""
        self.batch_idx, self.point = saved["batch_idx"], saved["point"]

    def validated(self) -> list[list[int]]:
        """Return the batches seen in validations within `fit`, by loader, as a checkpoint has them."""
        return sorted(map(list, self.batches_seen["fit_validate"].items()))

    def take(self, other: Progress) -> None:
        """Take over the counters of a run in another process."""
        vars(self).update(vars(other))
