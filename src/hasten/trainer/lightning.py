"""Where hasten meets Lightning: modules, callbacks and loggers written for it run under hasten's Trainer.

Nothing here is imported unless the script has imported Lightning itself, as `lightning.pytorch` or as
`pytorch_lightning`. Modules and callbacks of Lightning read a few names of their trainer that are no part of its
public face; `Face` answers to those.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hasten.errors import HastenError
from hasten.trainer.optimizing import clip

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def packages() -> list[Any]:
    """Lightning, under the names by which this process has imported it."""
    return [sys.modules[name] for name in _NAMES if name in sys.modules]


def is_lightning(thing: Any) -> bool:
    """Whether an object is of a class that derives from one of Lightning's."""
    return any(kind.__module__.startswith(_NAMES) for kind in type(thing).__mro__)


def bases(what: str) -> tuple[type, ...]:
    """Lightning's classes whose methods are defaults.

    Args:
        what: "module", "callback" or "datamodule".
    """
    found: list[type] = []
    for package in packages():
        core = sys.modules.get(f"{package.__name__}.core.hooks")
        data = [core.DataHooks, core.CheckpointHooks] if core else []
        if what == "module":
            found += [package.LightningModule, *([core.ModelHooks] if core else []), *data]
        elif what == "callback":
            found.append(package.Callback)
        else:
            found += [package.LightningDataModule, *data]
    return tuple(found)


def _exceptions() -> tuple[type[Exception], ...]:
    rooms = ("lightning.fabric.utilities.exceptions", "lightning_fabric.utilities.exceptions")
    return tuple(sys.modules[room].MisconfigurationException for room in rooms if room in sys.modules)


def misconfigured(message: str, fix: str = "") -> HastenError:
    """A HastenError that is Lightning's MisconfigurationException too."""
    error: HastenError = _made(_exceptions())(message, fix)
    return error


@functools.cache
def _made(kinds: tuple[type[Exception], ...]) -> Any:
    return type("MisconfigurationError", (HastenError, *kinds), {})


def default_logger(root: str) -> Any:
    """The logger that a script written for Lightning expects: TensorBoard where it is installed, else CSV."""
    import importlib

    package = packages()[0]
    loggers = importlib.import_module(f"{package.__name__}.loggers")
    try:
        return loggers.TensorBoardLogger(root)
    except ModuleNotFoundError:
        return loggers.CSVLogger(root)


class Face:
    """What Lightning's classes read of a trainer beside its public face.

    Args:
        trainer: hasten's.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.strategy = _Strategy(trainer)
        self.precision_plugin = _Precision(trainer)
        self.accelerator = _Accelerator(trainer)
        self.fit_loop = _FitLoop(trainer)
        self.validate_loop = _EvaluationLoop(trainer, "val")
        self.test_loop = _EvaluationLoop(trainer, "test")
        self.predict_loop = _EvaluationLoop(trainer, "predict")
        self._logger_connector = _LoggerConnector(trainer)
        self._accelerator_connector = _AcceleratorConnector(trainer)
        self._checkpoint_connector = _CheckpointConnector(trainer)
        self._callback_connector = _Nothing()
        self._data_connector = _Nothing()
        self._signal_connector = _Nothing()
        teach_loading()

    @property
    def version(self) -> str:
        """Lightning's version."""
        return str(getattr(packages()[0], "__version__", ""))

    @property
    def _results(self) -> Any:
        return self._trainer.board

    @property
    def _active_loop(self) -> Any:
        loops = {"train": self.fit_loop, "sanity_check": self.fit_loop, "test": self.test_loop}
        if self._trainer.validating:
            return self.fit_loop if self._trainer.stage.fn == "fit" else self.validate_loop
        return loops.get(str(self._trainer.stage.stage), self.predict_loop if self._trainer.predicting else None)

    @property
    def _evaluation_loop(self) -> Any:
        return self.fit_loop.epoch_loop.val_loop if self._trainer.stage.fn == "fit" else self._active_loop

    @property
    def is_last_batch(self) -> bool:
        """Whether this batch is the epoch's last."""
        return self.fit_loop.epoch_loop.batch_progress.is_last_batch

    def counted(self, optimizers: list[Any]) -> list[Any]:
        """The optimizers as LightningModules get them."""
        package = next(
            (one for one in packages() if isinstance(self._trainer.model, one.LightningModule)), packages()[0]
        )
        wrapper = sys.modules[f"{package.__name__}.core.optimizer"].LightningOptimizer
        wrapped = []
        for optimizer in optimizers:
            one = wrapper(optimizer)
            one._strategy = self.strategy
            wrapped.append(one)
        return wrapped

    def before_setup(self) -> None:
        """A LightningModule tells its device before it is moved there."""
        for module in self._trainer.model.modules():
            if hasattr(module, "_device") and is_lightning(module):
                module._device = self._trainer.device

    def metric_states(self) -> dict[str, Any]:
        """The states of torchmetrics in the module, which its state_dict leaves out."""
        return {
            name: {state: getattr(module, state) for state in module._defaults}
            for name, module in self._trainer.model.named_modules()
            if hasattr(module, "_defaults") and hasattr(module, "_update_count") and module._update_count
        }

    def load_metric_states(self, states: dict[str, Any]) -> None:
        """Put them back."""
        modules = dict(self._trainer.model.named_modules())
        for name, kept in states.items():
            if name in modules:
                for state, value in kept.items():
                    setattr(modules[name], state, value)
                modules[name]._update_count = 1


class _Part:
    """A part of the face."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def trainer(self) -> Trainer:
        """The trainer."""
        return self._trainer


class _Nothing:
    """A part that hasten has no use for: whatever is called on it does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class _Strategy(_Part):
    """What is read of `trainer.strategy`."""

    launcher = None
    checkpoint_io = None
    handles_gradient_accumulation = False

    @property
    def root_device(self) -> torch.device:
        return self._trainer.device

    @property
    def is_global_zero(self) -> bool:
        return self._trainer.is_global_zero

    @property
    def world_size(self) -> int:
        return self._trainer.world_size

    @property
    def global_rank(self) -> int:
        return self._trainer.global_rank

    @property
    def local_rank(self) -> int:
        return self._trainer.local_rank

    @property
    def node_rank(self) -> int:
        return self._trainer.node_rank

    @property
    def model(self) -> Any:
        return self._trainer.model

    @property
    def lightning_module(self) -> Any:
        return self._trainer.model

    @property
    def optimizers(self) -> list[Any]:
        return self._trainer.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        self._trainer.optimizers = optimizers

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        return self._trainer.lr_scheduler_configs

    @property
    def _lightning_optimizers(self) -> list[Any]:
        return self._trainer.counted_optimizers

    @property
    def precision_plugin(self) -> Any:
        return _Precision(self._trainer)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        trainer = self._trainer
        if trainer.model.automatic_optimization:
            return optimizer.step(closure=closure, **kwargs)
        for hook in trainer.hooks.of("on_before_optimizer_step"):
            hook(optimizer)
        answer = optimizer.step(closure=closure, **kwargs)
        trainer.global_step += 1
        return answer

    def backward(self, closure_loss: torch.Tensor, optimizer: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._trainer.backward(closure_loss, *args, **kwargs)
        return closure_loss

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        if self._trainer.world_size == 1 or not isinstance(tensor, torch.Tensor):
            return tensor
        return self._trainer.world.reduce(tensor, str(reduce_op).lower().replace("avg", "mean"))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._trainer.world.broadcast(obj, src)

    def barrier(self, name: str | None = None) -> None:
        self._trainer.world.barrier(name or "")

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        world = self._trainer.world
        return bool(world.all(decision) if all else world.any(decision))

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        return self._trainer.world.gather(tensor, sync_grads=sync_grads)

    def remove_checkpoint(self, filepath: Any) -> None:
        self._trainer.remove_checkpoint(filepath)

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        from hasten.trainer.checkpoint import write

        if self._trainer.is_global_zero:
            write(filepath, checkpoint, self._trainer.checkpoint_format)

    def model_sharded_context(self) -> Any:
        return contextlib.nullcontext()


class _Precision(_Part):
    """What is read of `trainer.precision_plugin`."""

    @property
    def precision(self) -> str:
        return self._trainer.precision

    def clip_gradients(self, optimizer: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: Any = None) -> None:
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        clip(optimizer, clip_val, str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm) or "norm"))


class _Accelerator(_Part):
    """What is read of `trainer.accelerator`."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        if torch.device(device).type == "cuda":
            return torch.cuda.memory_stats(device)
        import psutil

        memory = psutil.virtual_memory()
        return {"cpu_percent": psutil.cpu_percent(), "cpu_vm_percent": memory.percent}


class _LoggerConnector(_Part):
    """What is read of the part that collects logged values."""

    _current_fx: str | None = None
    _first_loop_iter: bool | None = None

    @property
    def should_update_logs(self) -> bool:
        trainer = self._trainer
        every = trainer.log_every_n_steps
        return bool(every and (trainer.logged_steps + 1) % every == 0) or (bool(every) and trainer.should_stop)

    def should_reset_tensors(self, fx: str) -> bool:
        return False

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self._trainer.log(metrics, step)


class _AcceleratorConnector(_Part):
    """What is read of the part that chose the devices."""

    @property
    def is_distributed(self) -> bool:
        return self._trainer.world_size > 1

    @property
    def use_distributed_sampler(self) -> bool:
        return self._trainer.use_distributed_sampler


class _CheckpointConnector(_Part):
    """What is read of the part that saves."""

    def dump_checkpoint(self, weights_only: bool = False) -> dict[str, Any]:
        return self._trainer.checkpointing.collected(weights_only)

    @property
    def _loaded_checkpoint(self) -> dict[str, Any]:
        return self._trainer.checkpointing.loaded or {}


class _Count:
    """A pair of counters as Lightning keeps many of: all are the same here."""

    def __init__(self, value: int) -> None:
        self.ready = self.started = self.processed = self.completed = value


class _Progress:
    """Counters of this epoch and of all."""

    def __init__(self, current: int, total: int, last: bool = False) -> None:
        self.current, self.total, self.is_last_batch = _Count(current), _Count(total), last


class _FitLoop(_Part):
    """What is read of `trainer.fit_loop`."""

    @property
    def epoch_loop(self) -> _EpochLoop:
        return _EpochLoop(self._trainer)

    @property
    def max_epochs(self) -> int | None:
        return self._trainer.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self._trainer.max_epochs = value

    @property
    def min_epochs(self) -> int | None:
        return self._trainer.min_epochs

    @min_epochs.setter
    def min_epochs(self, value: int | None) -> None:
        self._trainer.min_epochs = value

    @property
    def max_steps(self) -> int:
        return self._trainer.max_steps

    @property
    def max_batches(self) -> float:
        return self._trainer.num_training_batches

    @property
    def epoch_progress(self) -> _Progress:
        loop = self._trainer.loop
        progress = _Progress(self._trainer.current_epoch, self._trainer.current_epoch)
        if loop is not None:
            progress.current.processed = loop.epochs_processed
        return progress

    @property
    def total_batch_idx(self) -> int:
        return self._trainer.total_batches - 1

    @property
    def batch_idx(self) -> int:
        return self.epoch_loop.batch_idx

    @property
    def restarting(self) -> bool:
        loop = self._trainer.loop
        return loop is not None and loop.resumed is not None

    @property
    def _skip_backward(self) -> bool:
        return self._trainer.skip_backward

    @_skip_backward.setter
    def _skip_backward(self, skip: bool) -> None:
        self._trainer.skip_backward = skip

    @property
    def _combined_loader(self) -> Any:
        return self._trainer.train_source

    @property
    def _can_stop_early(self) -> bool:
        return self._trainer.loop is None or self._trainer.loop.may_stop()

    def _should_accumulate(self) -> bool:
        return self._trainer.loop is not None and self._trainer.loop.accumulating()

    def setup_data(self) -> None:
        if self._trainer.train_source is None:
            self._trainer.setup_source("train")

    @property
    def _data_source(self) -> Any:
        source = _Nothing()
        source.is_module = lambda: self._trainer.loaders.get("train") is None  # type: ignore[attr-defined]
        return source


class _EpochLoop(_Part):
    """What is read of `trainer.fit_loop.epoch_loop`."""

    @property
    def batch_progress(self) -> _Progress:
        trainer = self._trainer
        loop = trainer.loop
        done, last = (0, False) if loop is None else (loop.batch_idx, loop.last)
        progress = _Progress(done, trainer.total_batches, last)
        if loop is not None and loop.point == "batch":
            progress.current.ready, progress.total.ready = done + 1, trainer.total_batches + 1
        return progress

    @property
    def global_step(self) -> int:
        return self._trainer.global_step

    @property
    def batch_idx(self) -> int:
        return self.batch_progress.current.ready - 1

    @property
    def total_batch_idx(self) -> int:
        return self.batch_progress.total.ready - 1

    @property
    def min_steps(self) -> int | None:
        return self._trainer.min_steps

    @property
    def max_steps(self) -> int:
        return self._trainer.max_steps

    @max_steps.setter
    def max_steps(self, value: int) -> None:
        self._trainer.max_steps = value

    @property
    def _batches_that_stepped(self) -> int:
        return self._trainer.logged_steps

    @property
    def val_loop(self) -> _EvaluationLoop:
        return _EvaluationLoop(self._trainer, "val")

    def _should_check_val_epoch(self) -> bool:
        trainer = self._trainer
        every = trainer.check_val_every_n_epoch
        return trainer.enable_validation and (every is None or (trainer.current_epoch + 1) % every == 0)

    def _should_accumulate(self) -> bool:
        return self._trainer.loop is not None and self._trainer.loop.accumulating()


class _EvaluationLoop(_Part):
    """What is read of the validation, test and prediction loops."""

    def __init__(self, trainer: Trainer, kind: str) -> None:
        super().__init__(trainer)
        self._kind = kind

    @property
    def max_batches(self) -> list[float]:
        batches: list[float] = getattr(self._trainer, f"num_{self._kind}_batches")
        return self._trainer.num_sanity_val_batches if self._trainer.sanity_checking else batches

    @property
    def num_dataloaders(self) -> int:
        source = getattr(self._trainer, f"{self._kind}_source")
        return 0 if source is None else len(source.leaves)

    @property
    def batch_progress(self) -> _Progress:
        return _Progress(self._trainer.evaluated_batches, self._trainer.evaluated_batches)

    @property
    def _has_run(self) -> bool:
        return self._trainer.evaluated_batches > 0

    @property
    def predictions(self) -> Any:
        return self._trainer.predictions

    @property
    def current_batch_indices(self) -> Any:
        return self._trainer.predict_batch_indices

    @property
    def epoch_batch_indices(self) -> Any:
        return self._trainer.predict_indices


@functools.cache
def teach_loading() -> None:
    """Let `torch.load`, and so Lightning's `load_from_checkpoint`, read hasten's checkpoints in this process."""
    from hasten.trainer.checkpoint.files import is_hasten, read

    load = torch.load

    @functools.wraps(load)
    def load_either(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        path = f if isinstance(f, str | os.PathLike) else getattr(f, "name", None)
        if isinstance(path, str | os.PathLike) and is_hasten(path):
            return read(Path(path), map_location if isinstance(map_location, str | torch.device) else "cpu")
        return load(f, map_location, *args, **kwargs)

    torch.load = load_either
