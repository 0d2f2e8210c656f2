"""The interface of a process's session that taps, bounds and observers use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hasten.evidence import LoaderFacts
from hasten.taps.step_listeners import Listener, StepListeners

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from hasten.evidence import Evidence, LiveTrial
    from hasten.evidence.facts import LearningRates
    from hasten.evidence.recorder import Recorder
    from hasten.online.driver import Driver
    from hasten.run import Run
    from hasten.taps.config import RunConfig, TrialOptions


@dataclass(slots=True)
class BuiltLoader:
    """A DataLoader that the script has built.

    Attributes:
        loader: Returns the loader, or None once it was deleted.
        facts: The options it was built with.
        batch_bytes: Bytes of the first batch; 0 before that.
        skip_batches: Batches to skip before the next one is shown to `on_batch`.
    """

    loader: Callable[[], Any]
    facts: LoaderFacts
    batch_bytes: int = 0
    skip_batches: int = 0


class Observer(Protocol):
    """Observes a run for doctor, in addition to the taps."""

    def facts(self) -> dict[str, Any]:
        """Return the observations as fields of the evidence, by name; called once, when the run ends."""
        ...


class Session(ABC):
    """A process's session, as taps, bounds and observers see it.

    Attributes:
        config: This process's configuration.
        run: Applies techniques and holds the recorder, which is None if nothing is recorded (any more).
        trial: The limits of a trial; None outside of one.
        step_listeners: Calls listeners at the end of steps.
        loaders: Every DataLoader built; a loader's index here is its number.
        kept_loaders: Loaders kept alive until they are measured.
        optimizers: id of an optimizer -> a function that returns it (a weak reference; strong in a trial), and the
            `file:line` where it was built.
        rates: id of an optimizer -> its schedule and learning rates.
        trained_loaders: Numbers of the loaders with a finished training pass.
        observers: Doctor's observers.
        on_batch: Callbacks for a loader's number and a batch that it gave; each returns how many batches to skip before
            the next call.
        on_model: Callbacks for each outermost module before its first forward; their errors end the run.
        on_backward: Callbacks after each backward, with its tensors, further arguments and keywords.
        on_zeroed: Callback for when an optimizer sets gradients to zero.
        unscaled: id of a loss scaled by the script's GradScaler -> the unscaled loss.
        validating: Whether the last outermost forward was validation.
        without_graph: Whether the last outermost forward built no graph.
        maybe_validation_seconds: Seconds of the last outermost forward, if it counts as validation once a loss without
            a graph follows; else 0.0.
        profiling: Whether hasten itself profiles the current step.
        driver: Switches techniques while a tune runs.
        evidence_before_trials: The evidence from before doctor began to switch techniques; None until then.
        recorded: The recorder that `evidence_before_trials` was made from.
        try_changes: Set by doctor. Called once its limits are reached, with the seconds left and the listener that is
            still to be called at the end of steps; returns whether it switches techniques now.
        tried: Returns the effects of switching techniques in the run; None before that began.
        error: The script's own error, in one line.
        ended: How the run ended; "" before that.
        stopped_at: `file:line` at which a hanging run was ended.
    """

    run: Run

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.trial: TrialOptions | None = config.trial
        self.step_listeners = StepListeners()
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
        self.validating = self.without_graph = self.profiling = False
        self.maybe_validation_seconds = 0.0
        self.driver: Driver | None = None
        self.evidence_before_trials: Evidence | None = None
        self.recorded: Recorder | None = None
        self.try_changes: Callable[[float, Listener], bool] | None = None
        self.tried: Callable[[], tuple[LiveTrial, ...]] | None = None
        self.error = self.ended = self.stopped_at = ""

    @property
    def recorder(self) -> Recorder:
        """The run's recorder, for observers being installed; they are installed only if the run is recorded."""
        assert self.run.recorder is not None
        return self.run.recorder

    @property
    @abstractmethod
    def rank(self) -> int:
        """Rank of this process, set by its launcher; only rank 0 writes evidence."""

    @abstractmethod
    def listens_to_training(self) -> bool:
        """Return whether this process has built a loader, a model or an optimizer; a launcher or a worker has not."""

    @abstractmethod
    def is_helper(self) -> bool:
        """Return whether this process was forked or spawned by another Python process under hasten."""

    @abstractmethod
    def in_step(self) -> int:
        """Return the number (from 0) of the current training step; -1 outside of one, and during validation."""

    @abstractmethod
    def evidence_of(self, recorder: Recorder, may_probe: bool = True) -> Evidence:
        """Close a recorder and return its evidence, with everything else that is known.

        Args:
            recorder: The recorder.
            may_probe: Whether datasets may be probed for samples that repeat, where this run calls for it.
        """

    @abstractmethod
    def leave(self) -> None:
        """Write the evidence, if not written yet, and remove the live file; this process is about to end."""

    @abstractmethod
    def complete(self) -> None:
        """Write the evidence and end the process immediately: the trial or doctor has recorded enough."""
