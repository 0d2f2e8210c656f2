"""The interface of a session, as taps and observers see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hasten.evidence import LoaderFacts
from hasten.taps.steps_over import Listener, StepsOver

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from hasten.evidence import Evidence, TriedLive
    from hasten.evidence.facts import LearningRates
    from hasten.evidence.recorder import Recorder
    from hasten.online.driver import Driver
    from hasten.run import Run
    from hasten.taps.config import RunConfig, TrialOptions


@dataclass(slots=True)
class BuiltLoader:
    """A DataLoader that the script has built.

    Attributes:
        held: Gives the loader, None when it is gone.
        facts: What it was built with.
        batch_bytes: Of the first batch; 0 before that.
        look_in: Batches that come before the next one to be looked at.
    """

    held: Callable[[], Any]
    facts: LoaderFacts
    batch_bytes: int = 0
    look_in: int = 0


class Observer(Protocol):
    """Listens beside the taps, for doctor."""

    def facts(self) -> dict[str, Any]:
        """Return what was seen, as fields of the evidence by name; called once, when the run ends."""
        ...


class Session(ABC):
    """A process's session, as taps, bounds and observers see it.

    Attributes:
        config: What this process was told.
        run: Applies techniques, and has the recorder: None when nobody listens (any more).
        trial: The bounds of a trial; None outside of one.
        steps_over: Tells listeners that steps are over.
        loaders: Every DataLoader built; its place here is its number.
        kept_loaders: Loaders kept alive until they are measured.
        optimizers: id of an optimizer -> what holds it (weakly, or not in a trial), `file:line` where it was built.
        rates: id of an optimizer -> its schedule and learning rates.
        trained_loaders: Loaders of training passes that are over.
        observers: What doctor listens with.
        on_batch: Called with a loader's number and a batch it gave; each returns how many batches to skip before the
            next call.
        on_model: Called with each outermost module before its first forward; what they raise ends the run.
        on_backward: Called after each backward with its tensors, further arguments and keywords.
        on_zeroed: Called when an optimizer sets gradients to zero.
        unscaled: id of a loss scaled by the script's GradScaler -> the loss itself.
        validating: The last outermost forward was validation.
        without_graph: It built no graph.
        aside: Its seconds, where it is validation only if a loss without a graph follows.
        looking: hasten itself profiles the step that is going on.
        driver: Switches techniques while a tune runs.
        heard: The evidence as it was before doctor began to switch techniques; `recorded` is what it was made of.
        try_changes: Set by doctor. Called once its bounds are reached, with the seconds left and who goes on hearing of
            steps; returns whether it switches techniques now.
        tried: Returns what switching techniques in the run brought; None before that began.
        error: The script's own error, in one line.
        ended: How the run ended; "" before that.
        stopped_at: `file:line` where a run hung that was ended.
    """

    run: Run

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.trial: TrialOptions | None = config.trial
        self.steps_over = StepsOver()
        self.loaders: list[BuiltLoader] = []
        self.kept_loaders: list[DataLoader[Any]] = []
        self.optimizers: dict[int, tuple[Callable[[], Optimizer | None], str]] = {}
        self.rates: dict[int, LearningRates] = {}
        self.trained_loaders: set[int] = set()
        self.observers: list[Observer] = []
        self.on_batch: list[Callable[[int, Any], int]] = []
        self.on_model: list[Callable[[Any], None]] = []
        self.on_backward: list[Callable[[Any, tuple[Any, ...], dict[str, Any]], None]] = []
        self.on_zeroed: Callable[[], None] | None = None
        self.unscaled: dict[int, Tensor | None] = {}
        self.validating = self.without_graph = self.looking = False
        self.aside = 0.0
        self.driver: Driver | None = None
        self.heard: Evidence | None = None
        self.recorded: Recorder | None = None
        self.try_changes: Callable[[float, Listener], bool] | None = None
        self.tried: Callable[[], tuple[TriedLive, ...]] | None = None
        self.error = self.ended = self.stopped_at = ""

    @property
    def recorder(self) -> Recorder:
        """The run's recorder, for observers that are being installed: then somebody listens."""
        assert self.run.recorder is not None
        return self.run.recorder

    @property
    @abstractmethod
    def rank(self) -> int:
        """Rank of this process, as its launcher said; only rank 0 leaves evidence."""

    @abstractmethod
    def listens_to_training(self) -> bool:
        """Return whether this process has built what one trains with: a launcher or a worker has not."""

    @abstractmethod
    def is_helper(self) -> bool:
        """Return whether this process was forked or spawned by one that hasten listens to as well."""

    @abstractmethod
    def in_step(self) -> int:
        """Return the number (from 0) of the training step going on; -1 outside of one, and during validation."""

    @abstractmethod
    def evidence_of(self, recorder: Recorder, asks: bool = True) -> Evidence:
        """Return what a recorder holds, which is closed, with all else that is known.

        Args:
            recorder: The recorder.
            asks: Ask datasets too, if they should be.
        """

    @abstractmethod
    def leave(self) -> None:
        """Write the evidence, once, and remove the live file; this process is about to end."""

    @abstractmethod
    def complete(self) -> None:
        """Leave the evidence and end the process at once: the trial has what it wanted, or doctor has heard enough."""
