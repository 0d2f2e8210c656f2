"""What a Trainer is doing, and what was logged so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Stage:
    """What the Trainer is in the middle of.

    Attributes:
        fn: "fit", "validate", "test", "predict" or None.
        stage: "train", "sanity_check", "validate", "test", "predict" or None.
        status: "initializing", "running", "finished" or "interrupted".
    """

    fn: str | None = None
    stage: str | None = None
    status: str = "initializing"

    @property
    def finished(self) -> bool:
        """Whether it ended by itself."""
        return self.status == "finished"

    @property
    def stopped(self) -> bool:
        """Whether it is over, in whatever way."""
        return self.status in ("finished", "interrupted")


@dataclass
class Metrics:
    """Logged values by name, unread tensors: for callbacks, for loggers, for the progress line."""

    callback: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, Any] = field(default_factory=dict)
    bar: dict[str, Any] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget all."""
        self.callback, self.logged, self.bar = {}, {}, {}

    def to_cpu(self) -> None:
        """Bring the values to the host: training is over."""
        for values in (self.callback, self.logged, self.bar):
            values.update({name: value.cpu() if hasattr(value, "cpu") else value for name, value in values.items()})
