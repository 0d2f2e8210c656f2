"""EarlyStopping: end training when a metric no longer improves."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import torch

from hasten.trainer.callbacks.base import Callback
from hasten.trainer.callbacks.shared import check_mode, metric, missing_metric, say


class EarlyStoppingReason(Enum):
    """The reason why training was stopped."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(Callback):
    """Stop when a monitored metric has not improved for `patience` checks. All ranks stop if one of them does.

    Args:
        monitor: Name of the metric.
        min_delta: Smallest change that counts as an improvement.
        patience: Checks without improvement before training stops.
        verbose: Print when the metric improves and why training stops.
        mode: "min" if smaller is better, "max" if larger is.
        strict: Raise an error if the metric was not logged; otherwise skip the check.
        check_finite: Stop when the metric is NaN or infinite.
        stopping_threshold: Stop once the metric is better than this.
        divergence_threshold: Stop once the metric is worse than this.
        check_on_train_epoch_end: Check at the end of the training epoch, not of validation; None: at the end of the
            epoch if validation runs exactly once an epoch.
        log_rank_zero_only: Accepted for compatibility and ignored: only rank 0 prints anyway.

    Attributes:
        wait_count: Checks since the last improvement.
        stopped_epoch: Epoch in which it stopped training; 0 if it did not.
        best_score: Best value so far, a 0-dim tensor.
        stopping_reason: Why it stopped training.
        stopping_reason_message: The same in words.

    Raises:
        HastenError: The mode is unknown; at run time, the metric was not logged.
    """

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        check_mode("EarlyStopping", mode)
        self.monitor = monitor
        self.min_delta = min_delta if mode == "max" else -min_delta
        self.patience = patience
        self.verbose = verbose
        self.mode = mode
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.log_rank_zero_only = log_rank_zero_only
        self.wait_count = 0
        self.stopped_epoch = 0
        self.best_score = torch.tensor(math.inf if mode == "min" else -math.inf)
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self._check_on_train_epoch_end = check_on_train_epoch_end
        self._fitting = False
        self._was_over = False  # the resumed checkpoint says that training had stopped

    @property
    def state_key(self) -> str:
        """Key of its state, unique by metric and mode."""
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Decide when to check."""
        self._fitting = stage == "fit"
        if self._check_on_train_epoch_end is None:
            self._check_on_train_epoch_end = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Stop at once if the resumed run had already stopped and was killed before it ended."""
        if self._was_over:
            self._was_over = False
            trainer.should_stop = True
            say(trainer, f"EarlyStopping: this training had stopped before: {self.stopping_reason_message}")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Check the metric, unless checks follow validation."""
        if self._check_on_train_epoch_end:
            self._check(trainer)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Check the metric, unless checks follow the training epoch."""
        if not self._check_on_train_epoch_end and self._fitting and not trainer.sanity_checking:
            self._check(trainer)

    def _check(self, trainer: Any) -> None:
        """Read the metric and stop training on all ranks if one rank has a reason to."""
        if trainer.fast_dev_run:
            return
        current = metric(trainer.callback_metrics, self.monitor)
        if current is None:
            if self.strict:
                raise missing_metric("EarlyStopping", self.monitor, trainer.callback_metrics)
            if self.verbose:
                say(trainer, f"EarlyStopping: {self.monitor!r} was not logged, so nothing was checked")
            return
        reason, message = self._judge(current)
        stop = trainer.world.any(reason is not EarlyStoppingReason.NOT_STOPPED)
        if stop:
            self.stopping_reason, self.stopping_reason_message = reason, message
            self.stopped_epoch = trainer.current_epoch
            trainer.should_stop = True
        if message and self.verbose:
            say(trainer, f"EarlyStopping: {message}")

    def _better(self, value: torch.Tensor, than: torch.Tensor | float) -> bool:
        return bool(value < than if self.mode == "min" else value > than)

    def _judge(self, current: torch.Tensor) -> tuple[EarlyStoppingReason, str]:
        """Return whether and why to stop, with a message; update the best score and the wait count."""
        value = f"{self.monitor} = {current.item():.6g}"
        best = f"the best was {self.best_score.item():.6g}"
        if self.check_finite and not math.isfinite(current):
            return EarlyStoppingReason.NON_FINITE_METRIC, f"{value} is not finite; {best}"
        if self.stopping_threshold is not None and self._better(current, self.stopping_threshold):
            return EarlyStoppingReason.STOPPING_THRESHOLD, f"{value} reached {self.stopping_threshold}"
        # Negating both reverses the comparison: worse than the threshold, in either mode.
        if self.divergence_threshold is not None and self._better(-current, -self.divergence_threshold):
            return EarlyStoppingReason.DIVERGENCE_THRESHOLD, f"{value} is worse than {self.divergence_threshold}"
        if self._better(current - self.min_delta, self.best_score):
            self.best_score, self.wait_count = current, 0
            return EarlyStoppingReason.NOT_STOPPED, f"{value} improved; {best}"
        self.wait_count += 1
        if self.wait_count >= self.patience:
            message = f"{value} is the {self.wait_count}. check in a row without improvement; {best}"
            return EarlyStoppingReason.PATIENCE_EXHAUSTED, message
        return EarlyStoppingReason.NOT_STOPPED, ""

    def state_dict(self) -> dict[str, Any]:
        """Return the best score, the checks since then and the reason for stopping."""
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "patience": self.patience,
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue counting checks where the resumed run left off."""
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.best_score = torch.as_tensor(state_dict["best_score"])
        self.patience = state_dict["patience"]
        self.stopping_reason = EarlyStoppingReason(state_dict.get("stopping_reason", 0))
        self.stopping_reason_message = state_dict.get("stopping_reason_message")
        self._was_over = self._fitting and self.stopping_reason is not EarlyStoppingReason.NOT_STOPPED
