"""The stage a Trainer is in, and the values logged so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Function(StrEnum):
    """The Trainer method that was called."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningLoop(StrEnum):
    """The loop that is running."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether the loop is validation or test."""
        return self in ("validate", "test", "sanity_check")

    @property
    def dataloader_prefix(self) -> str:
        """The prefix of its loaders' names: "train", "val", "test" or "predict"."""
        return "val" if self in ("validate", "sanity_check") else self.value


class Status(StrEnum):
    """The status of a run."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether the run is over, finished or interrupted."""
        return self in ("finished", "interrupted")


@dataclass(eq=False)
class Stage:
    """The stage that a Trainer is in.

    Strings that are assigned become members of the enums above, which compare equal to them.

    Attributes:
        fn: "fit", "validate", "test", "predict" or None.
        stage: "train", "sanity_check", "validate", "test", "predict" or None.
        status: "initializing", "running", "finished" or "interrupted".
    """

    fn: Function | str | None = None
    stage: RunningLoop | str | None = None
    status: Status | str = Status.INITIALIZING

    def __setattr__(self, name: str, value: str | None) -> None:
        kind = {"fn": Function, "stage": RunningLoop, "status": Status}[name]
        object.__setattr__(self, name, value if value is None else kind(value))

    def __eq__(self, other: object) -> bool:
        """Return whether another state, of any class, has equal attributes."""
        return all(getattr(other, name, "") == value for name, value in vars(self).items())

    __hash__ = None  # type: ignore[assignment]  # mutable

    @property
    def finished(self) -> bool:
        """Whether the run ended normally."""
        return self.status == "finished"

    @property
    def stopped(self) -> bool:
        """Whether the run is over, finished or interrupted."""
        return self.status in ("finished", "interrupted")


@dataclass
class Metrics:
    """Logged values by name, for callbacks, loggers and the progress line: tensors not yet read from the device."""

    callback: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, Any] = field(default_factory=dict)
    bar: dict[str, Any] = field(default_factory=dict)

    def clear(self) -> None:
        """Drop all values."""
        self.callback, self.logged, self.bar = {}, {}, {}

    def to_cpu(self) -> None:
        """Copy the values to the host, when training is over."""
        for values in (self.callback, self.logged, self.bar):
            values.update({name: value.cpu() if hasattr(value, "cpu") else value for name, value in values.items()})
