"""Timer: end training after a given time."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any

from hasten.errors import HastenError
from hasten.trainer.callbacks.base import Callback
from hasten.trainer.callbacks.shared import say

_STAGES = ("train", "validate", "test")


class Timer(Callback):
    """Measure how long training, validation and testing take, and stop training when its time is up.

    In a resumed run, the time of the earlier run counts too.

    Args:
        duration: `timedelta`, its arguments as a dict, or "DD:HH:MM:SS"; None only measures.
        interval: "step": stop after any batch; "epoch": only at the end of an epoch.
        verbose: Print a message when the time is up.

    Raises:
        HastenError: The interval is unknown, or the duration cannot be parsed.
    """

    def __init__(
        self, duration: str | timedelta | dict[str, float] | None = None, interval: str = "step", verbose: bool = True
    ) -> None:
        if interval not in ("step", "epoch"):
            raise HastenError(f"Timer(interval={interval!r}): there is no such interval", 'use "step" or "epoch"')
        self._duration = None if duration is None else seconds_of(duration)
        self._interval = interval
        self._verbose = verbose
        self._start: dict[str, float] = {}
        self._end: dict[str, float] = {}
        self._before = 0.0  # seconds that the resumed run had trained

    def needs(self, hook: str) -> bool:
        """Return False for the batch hook unless training may stop after any batch."""
        return hook != "on_train_batch_end" or (self._interval == "step" and self._duration is not None)

    def start_time(self, stage: str = "train") -> float | None:
        """Return when a stage (train, validate, test) began, in seconds of `time.monotonic`."""
        return self._start.get(stage)

    def end_time(self, stage: str = "train") -> float | None:
        """Return when a stage ended, in seconds of `time.monotonic`."""
        return self._end.get(stage)

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds that a stage took, or has taken so far."""
        before = self._before if stage == "train" else 0.0
        start = self._start.get(stage)
        return before if start is None else self._end.get(stage, time.monotonic()) - start + before

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the seconds of training left; None without a duration."""
        return None if self._duration is None else self._duration - self.time_elapsed(stage)

    def _begin(self, stage: str) -> None:
        """Start a stage's clock."""
        self._start[stage] = time.monotonic()
        self._end.pop(stage, None)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._begin("train")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._end["train"] = time.monotonic()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._begin("validate")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._end["validate"] = time.monotonic()

    def on_test_start(self, trainer: Any, module: Any) -> None:
        self._begin("test")

    def on_test_end(self, trainer: Any, module: Any) -> None:
        self._end["test"] = time.monotonic()

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Stop at once if a resumed run's time was up already."""
        self._check(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._interval == "step":
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self._interval == "epoch":
            self._check(trainer)

    def _check(self, trainer: Any) -> None:
        """Stop training if the time is up."""
        if self._duration is None:
            return
        elapsed = self.time_elapsed()
        if trainer.world.any(trainer.is_global_zero and elapsed >= self._duration):  # rank 0's clock decides for all
            if self._verbose and not trainer.should_stop:
                say(trainer, f"time is up after {timedelta(seconds=int(elapsed))}: training stops")
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """Return how long each stage took."""
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in _STAGES}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the training time of the resumed run."""
        self._before = state_dict.get("time_elapsed", {}).get("train", 0.0)


def seconds_of(duration: str | timedelta | dict[str, float]) -> float:
    """Return the seconds of a `timedelta`, its arguments as a dict, or "DD:HH:MM:SS".

    Raises:
        HastenError: The duration has none of these forms.
    """
    if isinstance(duration, str):
        match = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", duration.strip())
        if match is None:
            raise HastenError(f"{duration!r} is not a duration", "write DD:HH:MM:SS, as 00:12:00:00 for 12 hours")
        days, hours, minutes, seconds = map(int, match.groups())
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
    if isinstance(duration, dict):
        try:
            return timedelta(**duration).total_seconds()
        except TypeError:
            raise HastenError(f"{duration!r} is not a duration", "use timedelta's arguments: {'hours': 12}") from None
    return duration.total_seconds()
