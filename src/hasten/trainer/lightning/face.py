"""Face: the attributes that Lightning's modules, callbacks and loggers read from a trainer besides its public ones."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hasten.trainer.adapter import Guest
from hasten.trainer.lightning.loading import teach_loading
from hasten.trainer.lightning.loops import EvaluationLoop, FitLoop
from hasten.trainer.lightning.names import is_lightning, packages, uploads
from hasten.trainer.lightning.parts import (
    Accelerator,
    AcceleratorConnector,
    CheckpointConnector,
    LoggerConnector,
    NoOpPart,
    Strategy,
    precision_of,
    reads,
)

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer


class Face(Guest):
    """Attributes that Lightning's classes read from a trainer besides its public ones (`strategy`, `fit_loop`, ...).

    The Trainer looks an unknown attribute up here. The objects are stand-ins that read the Trainer's own state.
    """

    moves_batches = True
    loads_callbacks = True
    lightning_module = reads("model")
    _results = reads("engine.board")

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.strategy = Strategy(trainer)
        self.precision_plugin = precision_of(trainer)
        self.accelerator = Accelerator(trainer)
        self.fit_loop = FitLoop(trainer)
        self.validate_loop = EvaluationLoop(trainer, "val")
        self.test_loop = EvaluationLoop(trainer, "test")
        self.predict_loop = EvaluationLoop(trainer, "predict")
        self._logger_connector = LoggerConnector(trainer)
        self._accelerator_connector = AcceleratorConnector(trainer)
        self._checkpoint_connector = CheckpointConnector(trainer)
        self._callback_connector = NoOpPart()
        self._data_connector = NoOpPart()
        self._signal_connector = NoOpPart()
        teach_loading()

    @property
    def version(self) -> str:
        """Lightning's version."""
        return str(getattr(packages()[0], "__version__", ""))

    @property
    def _active_loop(self) -> Any:
        """The stand-in for the loop that runs now."""
        loops = {"train": self.fit_loop, "sanity_check": self.fit_loop, "test": self.test_loop}
        if self._trainer.validating:
            return self.fit_loop if self._trainer.stage.fn == "fit" else self.validate_loop
        return loops.get(str(self._trainer.stage.stage), self.predict_loop if self._trainer.predicting else None)

    @property
    def _evaluation_loop(self) -> Any:
        """The stand-in for the evaluation loop that runs now."""
        return self.fit_loop.epoch_loop.val_loop if self._trainer.stage.fn == "fit" else self._active_loop

    @property
    def is_last_batch(self) -> bool:
        """Whether this batch is the epoch's last."""
        return self.fit_loop.epoch_loop.batch_progress.is_last_batch

    def is_leaving(self, error: BaseException) -> bool:
        """Return whether an exception is how Lightning's tuner ends a run that was only for tuning."""
        modules = [sys.modules[f"{package.__name__}.utilities.exceptions"] for package in packages()]
        return isinstance(error, tuple(module._TunerExitException for module in modules))

    def _of_package(self, module: str, name: str) -> Any:
        """Return a class from the Lightning package that the module's class comes from."""
        package = next(
            (package for package in packages() if isinstance(self._trainer.model, package.LightningModule)),
            packages()[0],
        )
        return getattr(sys.modules[f"{package.__name__}.{module}"], name)

    def scheduler_configs(self, configs: list[Any]) -> list[Any]:
        """Return the schedulers as Lightning's `LRSchedulerConfig` objects."""
        kind = self._of_package("utilities.types", "LRSchedulerConfig")
        return [kind(**vars(config)) for config in configs]

    def optimizers(self, counted: list[Any]) -> list[Any]:
        """Return the optimizers wrapped as LightningModules get them."""
        wrapper = self._of_package("core.optimizer", "LightningOptimizer")
        self.strategy.before_step = self._trainer.engine.hooks.of("on_before_optimizer_step")
        wrapped = [wrapper(entry.optimizer) for entry in counted]
        for optimizer in wrapped:
            optimizer._strategy = self.strategy
        return wrapped

    def before_profiling(self) -> None:
        """Give Lightning's profiler the module, from which it reads how much there is to do."""
        if is_lightning(self._trainer.profiler):
            self._trainer.profiler._lightning_module = weakref.proxy(self._trainer.model)

    def before_setup(self) -> None:
        """Prepare what Lightning's classes expect before the first hook.

        A LightningModule has its `device` before it is moved there, and its cache of torchmetrics is reset. Lightning's
        checkpoint callbacks and uploading loggers find files as soon as a save returns. Callbacks may call `self.log`.
        """
        if any(map(is_lightning, self._trainer.checkpoint_callbacks)) or any(map(uploads, self._trainer.loggers)):
            self._trainer.checkpointing.write_at_once()
        for module in self._trainer.model.modules():
            if hasattr(module, "_device") and is_lightning(module):
                module._device = self._trainer.device
                module._metric_attributes = None
        if hasattr(self._trainer.model, "log"):
            for callback in filter(is_lightning, self._trainer.callbacks):
                callback.log, callback.log_dict = self._trainer.model.log, self._trainer.model.log_dict

    def draw_for_reload(self, leaves: list[Any]) -> None:
        """Draw the random numbers that Lightning draws when loaders are reloaded, so that runs are equal.

        Lightning starts iterating reloaded loaders twice: this draws what its first start draws.
        """
        for leaf in leaves:
            if isinstance(leaf, torch.utils.data.DataLoader):
                torch.empty((), dtype=torch.int64).random_(generator=leaf.generator)
                # With workers, the sampler is drawn from at once; persistent workers draw no second seed.
                if (
                    leaf.num_workers
                    and not leaf.persistent_workers
                    and isinstance(leaf.sampler, torch.utils.data.RandomSampler)
                ):
                    torch.empty((), dtype=torch.int64).random_(generator=leaf.sampler.generator)

    def saved(self, state: dict[str, Any], weights_only: bool) -> None:
        """Add Lightning's version, the states of torchmetrics, and hyperparameters that are omegaconf configs."""
        state["pytorch-lightning_version"] = self.version
        if not weights_only and (states := self._metric_states()):
            state["torchmetrics"] = states
        omegaconf: Any = sys.modules.get("omegaconf")
        owners = (("", self._trainer.model), ("datamodule_", self._trainer.datamodule))
        for prefix, owner in owners if omegaconf is not None else ():
            hparams = getattr(owner, "hparams", None)
            if isinstance(hparams, omegaconf.Container) and hparams:
                state[f"{prefix}hyper_parameters"] = omegaconf.OmegaConf.to_container(hparams)
                state[f"{prefix}hparams_type"] = "omegaconf"

    def _metric_states(self) -> dict[str, Any]:
        """Return the states of torchmetrics in the module, which its state_dict leaves out."""
        return {
            name: {state: getattr(module, state) for state in module._defaults}
            for name, module in self._trainer.model.named_modules()
            if hasattr(module, "_defaults") and hasattr(module, "_update_count") and module._update_count
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the states of torchmetrics."""
        modules = dict(self._trainer.model.named_modules())
        for name, states in (state.get("torchmetrics") or {}).items():
            if name in modules:
                for attribute, value in states.items():
                    setattr(modules[name], attribute, value)
                modules[name]._update_count = 1
