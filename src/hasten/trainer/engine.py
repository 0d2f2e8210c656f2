"""Engine: what a Trainer builds for a run, and what its session, loops and steps work on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hasten.parallel import World, choose_devices
from hasten.run import Run
from hasten.trainer import feeding, hooks, profiling
from hasten.trainer.adapter import Guest, adapter
from hasten.trainer.callbacks.base import Callback
from hasten.trainer.feeding import Feed
from hasten.trainer.logged import LoggedValues, NothingLogged
from hasten.trainer.module import Module
from hasten.trainer.outermost import found_in
from hasten.trainer.precision import precision_named
from hasten.trainer.strategies import strategy_named

if TYPE_CHECKING:
    from hasten.trainer.config import Config
    from hasten.trainer.hooks import Hook, Hooks
    from hasten.trainer.loop import FitLoop
    from hasten.trainer.optimizing import SchedulerConfig
    from hasten.trainer.signals import Agreement
    from hasten.trainer.steps import Step
    from hasten.trainer.trainer import Trainer

_KINDS = ("train", "val", "test", "predict")


@dataclass
class Stopping:
    """Who wants the process to end, and how ranks agree on it.

    Attributes:
        signal: The signal that asked for it; 0: none.
        agreement: Of several ranks.
        interrupted: Whether the run is being left before its end.
    """

    signal: int = 0
    agreement: Agreement | None = None
    interrupted: bool = False


@dataclass
class Prediction:
    """Outputs so far of a prediction that runs.

    Attributes:
        outputs: By batch, or by loader and batch.
        indices: Samples of each batch, by loader; where a callback wants them.
        batch_indices: Samples of the batch at hand.
    """

    outputs: Any = None
    indices: Any = None
    batch_indices: list[int] | None = None


@dataclass
class Optimizing:
    """Optimizers and schedulers that `configure_optimizers` gave.

    Attributes:
        optimizers: As it gave them.
        counted: The same as the module gets them: their steps count.
        schedulers: Learning-rate schedulers, and when they step.
        prepare: Hooks and clipping, between the backward and an `optimizer_step` by the module.
        skips_backward: Whether steps only run the forward (stochastic weight averaging, in its last epoch).
        in_backward: Handles of what steps parameters within the backward.
    """

    optimizers: list[Any] = field(default_factory=list)
    counted: list[Any] = field(default_factory=list)
    schedulers: list[SchedulerConfig] = field(default_factory=list)
    prepare: Any = None
    skips_backward: bool = False
    in_backward: list[Any] = field(default_factory=list)

    def release(self) -> None:
        """The training is over: backwards step nothing any more."""
        while self.in_backward:
            self.in_backward.pop().remove()


class Engine:
    """Objects that a Trainer builds for its runs.

    Attributes:
        run: The techniques that are installed.
        world: The processes; one until the first run opens it.
        strategy: What they exchange.
        precision: In which formats the module lies and computes.
        model: The module.
        trained: The module trained last.
        outermost: Names of the modules that its first step called; None: not known yet.
        guest: What the run needs for classes of another framework.
        hooks: Those that somebody defined.
        feeds: The loaders: "train", "val", "test", "predict".
        optimizing: Optimizers and schedulers.
        loop: The training loop of this fit, or of the last.
        board: Where values are logged now.
        stopping: Who wants the process to end.
        prediction: What a prediction has given.
        val_check_batch: Validate every so many training batches.
        val_check_seconds: Validate every so many seconds, instead.
    """

    def __init__(self, trainer: Trainer, config: Config, run: Run) -> None:
        self.trainer = trainer
        self.run = run
        self.world = World(device=choose_devices(config.accelerator, config.devices)[0])
        self.opened = False
        self.processed = False  # techniques that act on the process have done so
        self.strategy = strategy_named(config.strategy)
        self.precision = precision_named(config.precision)
        self.model: Any = None
        self.datamodule: Any = None
        self.trained: Any = None
        self.outermost: list[str] | None = None
        self.guest = Guest()
        self.hooks: Hooks | Any = None
        self.feeds = {kind: Feed() for kind in _KINDS}
        self.optimizing = Optimizing()
        self.loop: FitLoop | None = None
        self.board: LoggedValues | None = None
        self.stopping = Stopping()
        self.prediction = Prediction()
        self.val_check_batch: float = math.inf
        self.val_check_seconds: float | None = None

    # -- whose they are ---------------------------------------------------------------------------------

    def attach(self, model: Any, datamodule: Any, loaders: dict[str, Any], fitting: bool) -> None:
        """Take a module and its loaders for the next run."""
        self.model, self.datamodule = model, datamodule
        if datamodule is not None:
            datamodule.trainer = self.trainer
        for kind in _KINDS:
            keeps = not fitting and kind not in loaders  # a test leaves what `fit` validated on
            self.feeds[kind] = Feed(loaders.get(kind), self.feeds[kind] if keeps else None)

    def meet(self) -> None:
        """The run begins: find out which hooks there are, and what classes of another framework need."""
        trainer, model = self.trainer, self.model
        self.guest = adapter().guest(trainer)
        if isinstance(model, Module):
            model.__dict__["_trainer"] = trainer
        else:
            model.trainer = trainer
        wrap = self.profiled if profiling.measures(trainer.profiler) else None
        kinds = self.bases("module"), self.bases("callback"), self.bases("datamodule")
        self.hooks = hooks.Hooks(trainer, model, *kinds, wrap)

    def bases(self, what: str) -> tuple[type, ...]:
        """Return the classes whose methods are defaults, of a "module", "callback" or "datamodule"."""
        own: dict[str, tuple[type, ...]] = {"module": (Module, hooks.ModuleHooks), "callback": (Callback,)}
        return own.get(what, ()) + adapter().bases(what)

    def has_step(self, name: str) -> bool:
        """Return whether the module has a step of its own."""
        return hooks.overridden(self.model, name, *self.bases("module"))

    def profiled(self, label: str, method: Hook) -> Hook:
        """Return a hook behind the profiler."""
        return profiling.profiled(self.trainer.profiler, label, method)

    # -- logging -----------------------------------------------------------------------------------------

    def new_board(self, training: bool) -> LoggedValues:
        """Return where values are logged; with `barebones` it keeps none."""
        if self.trainer.config.barebones:
            return NothingLogged(training)
        return LoggedValues(training, None if self.world.size == 1 else self._reduce, self.trainer.misconfigured)

    def _reduce(self, value: torch.Tensor, reduce_op: str = "mean", group: Any = None) -> torch.Tensor:
        operation = str(reduce_op).lower().replace("avg", "mean")
        if self.world.rank % self.strategy.copies and operation in ("sum", "product"):
            value = torch.zeros_like(value) if operation == "sum" else torch.ones_like(value)  # its batch counts once
        return self.world.reduce(value, operation)

    # -- loaders -----------------------------------------------------------------------------------------

    def reload_is_due(self, kind: str) -> bool:
        """Return whether module or datamodule are to be asked for their loaders again."""
        every = self.trainer.config.reload_dataloaders_every_n_epochs
        return bool(every) and self.trainer.current_epoch - self.feeds[kind].asked_in_epoch >= every

    def training_source(self) -> Any:
        """Return the training loaders of this epoch."""
        if self.reload_is_due("train"):
            feeding.setup(self.trainer, "train")
            self.guest.draw_for_reload(self.feeds["train"].source.leaves)
        return self.feeds["train"].source

    # -- in the loop -------------------------------------------------------------------------------------

    def first_step(self, step: Step) -> Step:
        """Return the first step of a training: techniques that change models see what is called in it."""
        if self.outermost is not None or not self.run.acting("model"):
            return step
        return found_in(step, self.model, self.run, self._keep_outermost)

    def _keep_outermost(self, names: list[str]) -> None:
        self.outermost = names

    def change_again(self, names: list[str]) -> None:
        """Change the modules that were changed in the run that goes on, before its next step."""
        modules = dict(self.model.named_modules())
        self.outermost = [name for name in names if name in modules]
        for name in self.outermost:
            self.run.model(modules[name], ())

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("hooks", "loop", "board"):
            state[name] = None
        given = self.optimizing
        state["guest"] = Guest()
        state["optimizing"] = Optimizing(given.optimizers, [], given.schedulers, None, given.skips_backward)
        state["stopping"] = Stopping(self.stopping.signal, None, self.stopping.interrupted)
        return state
