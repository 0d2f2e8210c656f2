"""The stage a Trainer is in, and the values logged so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Function(StrEnum):
    """The Trainer method that a person called."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class Running(StrEnum):
    """The loop that runs now."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether it is validation or test."""
        return self in ("validate", "test", "sanity_check")

    @property
    def dataloader_prefix(self) -> str:
        """How its loaders are called: "train", "val", "test" or "predict"."""
        return "val" if self in ("validate", "sanity_check") else self.value


class Status(StrEnum):
    """How far a run is."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether it is over, in whatever way."""
        return self in ("finished", "interrupted")


@dataclass(eq=False)
class Stage:
    """The stage that a Trainer is in.

    Texts become members of these, which equal them.

    Attributes:
        fn: "fit", "validate", "test", "predict" or None.
        stage: "train", "sanity_check", "validate", "test", "predict" or None.
        status: "initializing", "running", "finished" or "interrupted".
    """

    fn: Function | str | None = None
    stage: Running | str | None = None
    status: Status | str = Status.INITIALIZING

    def __setattr__(self, name: str, value: str | None) -> None:
        kind = {"fn": Function, "stage": Running, "status": Status}[name]
        object.__setattr__(self, name, value if value is None else kind(value))

    def __eq__(self, other: object) -> bool:
        """Whether another state, of whatever class, says the same."""
        return all(getattr(other, name, "") == value for name, value in vars(self).items())

    __hash__ = None  # type: ignore[assignment]  # it changes

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
