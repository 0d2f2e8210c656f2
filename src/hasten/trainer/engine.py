"""Engine: the objects that a Trainer builds for a run, shared by its session, loops and steps.

The Trainer is the public face and Config its flags; everything built from them lives here: processes, strategy, hooks,
loaders, optimizers, the loop. A copied or pickled Engine leaves out what a run builds again.
"""

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
from hasten.trainer.outermost import record_outermost
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

_LOADER_KINDS = ("train", "val", "test", "predict")


@dataclass
class Stopping:
    """A request to end the process, and how ranks agree on when.

    Attributes:
        signal: The signal that requested it; 0: none.
        agreement: The agreement between ranks; None with one rank.
        interrupted: Whether the run is ending early.
    """

    signal: int = 0
    agreement: Agreement | None = None
    interrupted: bool = False


@dataclass
class Prediction:
    """Outputs so far of a running prediction.

    Attributes:
        outputs: Outputs by batch, or by loader and batch.
        indices: Sample indices of each batch, by loader; filled only if a callback writes predictions by epoch.
        batch_indices: Sample indices of the current batch.
    """

    outputs: Any = None
    indices: Any = None
    batch_indices: list[int] | None = None


@dataclass
class Optimizing:
    """The optimizers and schedulers that `configure_optimizers` returned.

    Attributes:
        optimizers: The optimizers as returned.
        counted: The wrappers that the module gets, whose steps are counted.
        schedulers: The learning-rate schedulers, and when they step.
        prepare: Function that calls hooks and clips, between backward and optimizer step.
        skips_backward: Whether steps run only the forward (stochastic weight averaging, in its last epoch).
        in_backward: Handles of the hooks that step parameters within the backward.
    """

    optimizers: list[Any] = field(default_factory=list)
    counted: list[Any] = field(default_factory=list)
    schedulers: list[SchedulerConfig] = field(default_factory=list)
    prepare: Any = None
    skips_backward: bool = False
    in_backward: list[Any] = field(default_factory=list)

    def release(self) -> None:
        """Remove the hooks that step parameters in the backward; training is over."""
        while self.in_backward:
            self.in_backward.pop().remove()


class Engine:
    """The objects that a Trainer builds for its runs.

    Attributes:
        run: The Run with the installed techniques.
        world: The processes that train together; a world of one until the first run joins them.
        opened: Whether the processes have been joined.
        processed: Whether process-wide techniques have acted.
        strategy: How processes share the model and exchange gradients.
        precision: The dtypes of the module's parameters and computation.
        model: The module.
        datamodule: The datamodule, or None.
        trained: The module trained last.
        outermost: Names of the modules that its first step called from outside; None: not known yet.
        guest: Additions for classes of another framework.
        hooks: The hooks that are defined.
        feeds: The loaders of each kind: "train", "val", "test", "predict".
        optimizing: Optimizers and schedulers.
        loop: The training loop of this fit, or of the last.
        board: Collects the values that are logged now; None: nothing may be logged.
        stopping: A request to end the process.
        prediction: Outputs of a prediction.
        val_check_batch: Validate every this many training batches.
        val_check_seconds: If set, validate every this many seconds instead.
    """

    def __init__(self, trainer: Trainer, config: Config, run: Run) -> None:
        self.trainer = trainer
        self.run = run
        self.world = World(device=choose_devices(config.accelerator, config.devices)[0])
        self.opened = False
        self.processed = False
        self.strategy = strategy_named(config.strategy)
        self.precision = precision_named(config.precision)
        self.model: Any = None
        self.datamodule: Any = None
        self.trained: Any = None
        self.outermost: list[str] | None = None
        self.guest = Guest()
        self.hooks: Hooks | Any = None
        self.feeds = {kind: Feed() for kind in _LOADER_KINDS}
        self.optimizing = Optimizing()
        self.loop: FitLoop | None = None
        self.board: LoggedValues | None = None
        self.stopping = Stopping()
        self.prediction = Prediction()
        self.val_check_batch: float = math.inf
        self.val_check_seconds: float | None = None

    # -- module and hooks -------------------------------------------------------------------------------

    def attach(self, model: Any, datamodule: Any, loaders: dict[str, Any], fitting: bool) -> None:
        """Set the module and the loaders of the next run."""
        self.model, self.datamodule = model, datamodule
        if datamodule is not None:
            datamodule.trainer = self.trainer
        for kind in _LOADER_KINDS:
            keeps = not fitting and kind not in loaders  # `test` keeps the loaders that `fit` trained and validated on
            self.feeds[kind] = Feed(loaders.get(kind), self.feeds[kind] if keeps else None)

    def meet(self) -> None:
        """Begin a run: collect the hooks, give the module its trainer, and adapt to another framework's classes."""
        trainer, model = self.trainer, self.model
        self.guest = adapter().guest(trainer)
        if isinstance(model, Module):
            model.__dict__["_trainer"] = trainer
        else:  # another framework's module
            model.trainer = trainer
        wrap = self.profiled if profiling.measures(trainer.profiler) else None
        kinds = self.bases("module"), self.bases("callback"), self.bases("datamodule")
        self.hooks = hooks.Hooks(trainer, model, *kinds, wrap)

    def bases(self, kind: str) -> tuple[type, ...]:
        """Return the classes whose methods count as defaults, for a "module", "callback" or "datamodule"."""
        own: dict[str, tuple[type, ...]] = {"module": (Module, hooks.ModuleHooks), "callback": (Callback,)}
        return own.get(kind, ()) + adapter().bases(kind)

    def has_step(self, name: str) -> bool:
        """Return whether the module defines a step method (or hook) itself."""
        return hooks.overridden(self.model, name, *self.bases("module"))

    def profiled(self, label: str, method: Hook) -> Hook:
        """Wrap a hook so that the profiler times it."""
        return profiling.profiled(self.trainer.profiler, label, method)

    # -- logging -----------------------------------------------------------------------------------------

    def new_board(self, training: bool) -> LoggedValues:
        """Return a new collector for logged values; with `barebones`, one that stores none."""
        if self.trainer.config.barebones:
            return NothingLogged(training)
        return LoggedValues(training, None if self.world.size == 1 else self._reduce, self.trainer.misconfigured)

    def _reduce(self, value: torch.Tensor, reduce_op: str = "mean", group: Any = None) -> torch.Tensor:
        """Reduce a logged value over all processes."""
        operation = str(reduce_op).lower().replace("avg", "mean")
        if self.world.rank % self.strategy.copies and operation in ("sum", "product"):
            # Several ranks hold the same batch (a pipeline, for example): it must count once.
            value = torch.zeros_like(value) if operation == "sum" else torch.ones_like(value)
        return self.world.reduce(value, operation)

    # -- loaders -----------------------------------------------------------------------------------------

    def reload_is_due(self, kind: str) -> bool:
        """Return whether loaders must be requested again, by `reload_dataloaders_every_n_epochs`."""
        every = self.trainer.config.reload_dataloaders_every_n_epochs
        return bool(every) and self.trainer.current_epoch - self.feeds[kind].asked_in_epoch >= every

    def training_source(self) -> Any:
        """Return the training loaders of this epoch, requested again if that is due."""
        if self.reload_is_due("train"):
            feeding.setup(self.trainer, "train")
            self.guest.draw_for_reload(self.feeds["train"].source.leaves)
        return self.feeds["train"].source

    # -- in the loop -------------------------------------------------------------------------------------

    def first_step(self, step: Step) -> Step:
        """Return the step for a training's first batch, in which model techniques learn which modules are called."""
        if self.outermost is not None or not self.run.techniques_at("model"):
            return step
        return record_outermost(step, self.model, self.run, self._keep_outermost)

    def _keep_outermost(self, names: list[str]) -> None:
        self.outermost = names

    def change_again(self, names: list[str]) -> None:
        """Let techniques change, before the next step, the modules that they had changed in the resumed run."""
        modules = dict(self.model.named_modules())
        self.outermost = [name for name in names if name in modules]
        for name in self.outermost:
            self.run.model(modules[name], ())

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("hooks", "loop", "board"):
            state[name] = None
        optimizing = self.optimizing
        state["guest"] = Guest()
        state["optimizing"] = Optimizing(
            optimizing.optimizers, [], optimizing.schedulers, None, optimizing.skips_backward
        )
        state["stopping"] = Stopping(self.stopping.signal, None, self.stopping.interrupted)
        return state
