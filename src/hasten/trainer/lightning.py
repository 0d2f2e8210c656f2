"""Where hasten meets Lightning: modules, callbacks and loggers written for it run under hasten's Trainer.

Nothing here is imported unless the script has imported Lightning itself, as `lightning.pytorch` or as
`pytorch_lightning`. Modules and callbacks of Lightning read a few names of their trainer that are no part of its
public face; `Face` answers to those.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hasten.errors import HastenError
from hasten.trainer import checks
from hasten.trainer import lightning_tuning as tuning
from hasten.trainer.optimizing import clip
from hasten.trainer.steps import after, prepared

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


def warning_kind() -> type[Warning]:
    """Lightning's category for warnings about what may be meant."""
    rooms = ("lightning.fabric.utilities.warnings", "lightning_fabric.utilities.warnings")
    return next((sys.modules[room].PossibleUserWarning for room in rooms if room in sys.modules), UserWarning)


def stopped_kind(kind: type[SystemExit]) -> type[SystemExit]:
    """The exception for a training that SIGTERM ended, which is Lightning's too."""
    kinds = [sys.modules[f"{package.__name__}.utilities.exceptions"].SIGTERMException for package in packages()]
    return type("Stopped", (kind, *dict.fromkeys(kinds)), {})


def misconfigured(message: str, fix: str = "") -> HastenError:
    """A HastenError that is Lightning's MisconfigurationException too."""
    error: HastenError = _made(_exceptions())(message, fix)
    return error


@functools.cache
def _made(kinds: tuple[type[Exception], ...]) -> Any:
    return type("MisconfigurationError", (HastenError, *kinds), {})


def default_logger(root: str) -> Any:
    """The logger that a script written for Lightning expects: TensorBoard where it is installed, else CSV."""
    package = packages()[0]
    loggers = importlib.import_module(f"{package.__name__}.loggers")
    try:
        return loggers.TensorBoardLogger(root)
    except ModuleNotFoundError:
        return loggers.CSVLogger(root)


def silent_logger() -> Any:
    """Lightning's logger that logs nothing."""
    return importlib.import_module(f"{packages()[0].__name__}.loggers.logger").DummyLogger()


def profilers() -> tuple[dict[str, Any], Any]:
    """Lightning's profilers by their names, and the one that does nothing."""
    room = importlib.import_module(f"{packages()[0].__name__}.profilers")
    named = {"simple": room.SimpleProfiler, "advanced": room.AdvancedProfiler, "pytorch": room.PyTorchProfiler}
    return named, room.PassThroughProfiler


def default_summary(bars: list[Any]) -> Any:
    """Lightning's summary of a model; the one made with rich beside its progress bar made with rich."""
    callbacks = packages()[0].callbacks
    rich = any(isinstance(bar, package.callbacks.RichProgressBar) for bar in bars for package in packages())
    return callbacks.RichModelSummary() if rich else callbacks.ModelSummary()


def _uploads(logger: Any) -> bool:
    """Whether a logger of Lightning takes each checkpoint away as soon as it is there."""
    return bool(getattr(logger, "_log_model", False) or getattr(logger, "_log_model_checkpoints", False))


def strategy_name(given: Any) -> str:
    """hasten's name for a strategy object of Lightning's; "" where it has none."""
    kind = type(given).__name__
    if kind == "SingleDeviceStrategy":
        return "auto"
    if kind != "DDPStrategy":
        return ""
    start = getattr(given, "_start_method", "popen")
    name = {"popen": "ddp", "spawn": "ddp_spawn", "fork": "ddp_fork", "forkserver": "ddp_spawn"}[start]
    unused = getattr(given, "_ddp_kwargs", {}).get("find_unused_parameters")
    return f"{name}_find_unused_parameters_true" if unused else name


class Face:
    """What Lightning's classes read of a trainer beside its public face.

    Args:
        trainer: hasten's.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.strategy = _Strategy(trainer)
        self.precision_plugin = _precision(trainer)
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

    def is_leaving(self, error: BaseException) -> bool:
        """Whether an exception is the tuner's way to end a run that was only for itself."""
        rooms = [sys.modules[f"{package.__name__}.utilities.exceptions"] for package in packages()]
        return isinstance(error, tuple(room._TunerExitException for room in rooms))

    def _of_package(self, room: str, name: str) -> Any:
        """A class of the Lightning that the module comes from."""
        package = next(
            (one for one in packages() if isinstance(self._trainer.model, one.LightningModule)), packages()[0]
        )
        return getattr(sys.modules[f"{package.__name__}.{room}"], name)

    def scheduler_configs(self, configs: list[Any]) -> list[Any]:
        """The schedulers as people who use Lightning know them."""
        kind = self._of_package("utilities.types", "LRSchedulerConfig")
        return [kind(**vars(config)) for config in configs]

    def counted(self, optimizers: list[Any]) -> list[Any]:
        """The optimizers as LightningModules get them."""
        wrapper = self._of_package("core.optimizer", "LightningOptimizer")
        wrapped = []
        self.strategy.before_step = self._trainer.hooks.of("on_before_optimizer_step")
        for optimizer in optimizers:
            one = wrapper(optimizer)
            one._strategy = self.strategy
            wrapped.append(one)
        return wrapped

    def before_profiling(self) -> None:
        """Lightning's profilers ask the module how much there is to do."""
        if is_lightning(self._trainer.profiler):
            self._trainer.profiler._lightning_module = weakref.proxy(self._trainer.model)

    def before_setup(self) -> None:
        """What Lightning's classes take for granted before the first hook.

        A LightningModule knows its device before it is moved there and forgets which torchmetrics it had, checkpoint
        callbacks and loggers find files at once, and callbacks may say `self.log`.
        """
        if any(map(is_lightning, self._trainer.checkpoint_callbacks)) or any(map(_uploads, self._trainer.loggers)):
            self._trainer.checkpointing.write_at_once()
        for module in self._trainer.model.modules():
            if hasattr(module, "_device") and is_lightning(module):
                module._device = self._trainer.device
                module._metric_attributes = None
        if hasattr(self._trainer.model, "log"):
            for callback in filter(is_lightning, self._trainer.callbacks):
                callback.log, callback.log_dict = self._trainer.model.log, self._trainer.model.log_dict

    def draw_for_reload(self, leaves: list[Any]) -> None:
        """Lightning begins a pass through reloaded loaders twice: draw what its first one draws, for equal numbers."""
        for leaf in leaves:
            if isinstance(leaf, torch.utils.data.DataLoader):
                torch.empty((), dtype=torch.int64).random_(generator=leaf.generator)
                # With workers the sampler is drawn from at once; those that persist draw no second seed.
                if (
                    leaf.num_workers
                    and not leaf.persistent_workers
                    and isinstance(leaf.sampler, torch.utils.data.RandomSampler)
                ):
                    torch.empty((), dtype=torch.int64).random_(generator=leaf.sampler.generator)

    def metric_states(self) -> dict[str, Any]:
        """The states of torchmetrics in the module, which its state_dict leaves out."""
        return {
            name: {state: getattr(module, state) for state in module._defaults}
            for name, module in self._trainer.model.named_modules()
            if hasattr(module, "_defaults") and hasattr(module, "_update_count") and module._update_count
        }

    def is_config(self, hparams: Any) -> bool:
        """Whether hyper-parameters are a config of omegaconf."""
        omegaconf = sys.modules.get("omegaconf")
        return omegaconf is not None and isinstance(hparams, omegaconf.Container)

    def plain_config(self, hparams: Any) -> Any:
        """Such a config as plain dicts and lists, which a checkpoint can hold safely."""
        return sys.modules["omegaconf"].OmegaConf.to_container(hparams)

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
    before_step: list[Any] = []  # noqa: RUF012  # hooks; set anew with the optimizers

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
        if self._trainer.lightning is not None:
            self._trainer.counted_optimizers = self._trainer.lightning.counted(optimizers)

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        return self._trainer.lr_scheduler_configs

    @lr_scheduler_configs.setter
    def lr_scheduler_configs(self, configs: list[Any]) -> None:
        self._trainer.lr_scheduler_configs = configs

    @property
    def _lightning_optimizers(self) -> list[Any]:
        return self._trainer.counted_optimizers

    @property
    def precision_plugin(self) -> Any:
        return self._trainer.precision_plugin

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        trainer = self._trainer
        if trainer.model.automatic_optimization:
            return optimizer.step(closure=prepared(closure, trainer.before_own_step), **kwargs)
        answer = optimizer.step(closure=after(closure, self.before_step, optimizer), **kwargs)
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
    """What is read of `trainer.precision_plugin`; see `_precision`."""

    @property
    def _desired_input_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision.startswith("bf16") else torch.float16

    @property
    def precision(self) -> str:
        return self._trainer.precision

    def clip_gradients(self, optimizer: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: Any = None) -> None:
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        clip(optimizer, clip_val, str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm) or "norm"))


def _precision(trainer: Trainer) -> _Precision:
    """An object of Lightning's class for the trainer's precision, by which others tell it."""
    return _precision_kind(packages()[0].__name__, trainer.precision)(trainer)


@functools.cache
def _precision_kind(package: str, precision: str) -> type[_Precision]:
    names = {"64-true": "DoublePrecision", "bf16-true": "HalfPrecision", "16-true": "HalfPrecision"}
    name = "MixedPrecision" if precision.endswith("-mixed") else names.get(precision, "Precision")
    kind = getattr(importlib.import_module(f"{package}.plugins.precision"), name)
    return type(name, (_Precision, kind), {})


class _Accelerator(_Part):
    """What is read of `trainer.accelerator`."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        if torch.device(device).type == "cuda":
            return torch.cuda.memory_stats(device)
        import psutil

        return {
            "cpu_percent": psutil.cpu_percent(),
            "cpu_vm_percent": psutil.virtual_memory().percent,
            "cpu_swap_percent": psutil.swap_memory().percent,
        }


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

    def restore(self, path: Any) -> None:
        tuning.restore(self._trainer, path)

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


class _Reset:
    """A counter that can only be set back."""

    def __init__(self, reset: Any) -> None:
        self.reset = reset


class _Loop(_Part):
    """What is read of any loop: its loaders, and what the tuner does to it. `_kind`: "train", "val", "test" or
    "predict"; `_named`: Lightning's class of this name is the one that it is taken for."""

    _kind = "train"
    _named = "_FitLoop"

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return getattr(sys.modules[f"{packages()[0].__name__}.loops"], self._named)

    @property
    def _combined_loader(self) -> Any:
        source = getattr(self._trainer, f"{self._kind}_source")
        return None if source is None else tuning.Loaders(source)

    @_combined_loader.setter
    def _combined_loader(self, loaders: None) -> None:
        tuning.forget_loaders(self._trainer, self._kind)

    def setup_data(self) -> None:
        if getattr(self._trainer, f"{self._kind}_source") is None:
            self._trainer.setup_source(self._kind)

    def state_dict(self) -> dict[str, Any]:
        return tuning.counters(self._trainer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        tuning.restore_counters(self._trainer, state_dict)

    def reset(self) -> None:
        pass  # each run begins anew


class _FitLoop(_Loop):
    """What is read of `trainer.fit_loop`."""

    def run(self) -> None:
        tuning.fit(self._trainer)

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

    @max_batches.setter
    def max_batches(self, value: float) -> None:
        self._trainer.num_training_batches = value

    @property
    def epoch_progress(self) -> _Progress:
        loop = self._trainer.loop
        progress = _Progress(self._trainer.current_epoch, self._trainer.current_epoch)
        progress.reset = lambda: setattr(self._trainer, "current_epoch", 0)  # type: ignore[attr-defined]
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

    @restarting.setter
    def restarting(self, restarting: bool) -> None:
        pass  # the tuner says that its trials are none

    @property
    def _skip_backward(self) -> bool:
        return self._trainer.skip_backward

    @_skip_backward.setter
    def _skip_backward(self, skip: bool) -> None:
        self._trainer.skip_backward = skip

    @property
    def _can_stop_early(self) -> bool:
        return self._trainer.loop is None or self._trainer.loop.may_stop()

    def _should_accumulate(self) -> bool:
        return self._trainer.loop is not None and self._trainer.loop.accumulating()

    @property
    def _data_source(self) -> _DataSource:
        return _DataSource(self._trainer, "train")


class _DataSource(_Part):
    """Where loaders of a kind come from."""

    def __init__(self, trainer: Trainer, kind: str) -> None:
        super().__init__(trainer)
        self._kind = kind

    def is_module(self) -> bool:
        return self._trainer.loaders.get(self._kind) is None

    def is_defined(self) -> bool:
        return not self.is_module() or checks.defines(self._trainer, f"{self._kind}_dataloader")


class _EpochLoop(_Part):
    """What is read of `trainer.fit_loop.epoch_loop`."""

    @property
    def automatic_optimization(self) -> Any:
        part = _Nothing()
        part.optim_progress = _Reset(lambda: setattr(self._trainer, "global_step", 0))  # type: ignore[attr-defined]
        return part

    @property
    def manual_optimization(self) -> Any:
        part = _Nothing()
        part.optim_step_progress = self.automatic_optimization.optim_progress  # type: ignore[attr-defined]
        return part

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
        return self._trainer.validates_this_epoch

    def _should_accumulate(self) -> bool:
        return self._trainer.loop is not None and self._trainer.loop.accumulating()


class _EvaluationLoop(_Loop):
    """What is read of the validation, test and prediction loops."""

    verbose = True
    restarting = False

    def __init__(self, trainer: Trainer, kind: str) -> None:
        super().__init__(trainer)
        self._kind = kind
        self._data_source = _DataSource(trainer, kind)
        self._named = "_PredictionLoop" if kind == "predict" else "_EvaluationLoop"

    def run(self) -> None:
        tuning.run_evaluation(self._trainer, self._kind)

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
        return self._trainer.evaluated_batches > 0 and not self._trainer.sanity_checking

    @property
    def predictions(self) -> Any:
        return self._trainer.predictions

    @property
    def current_batch_indices(self) -> Any:
        return self._trainer.predict_batch_indices

    @property
    def epoch_batch_indices(self) -> Any:
        return self._trainer.predict_indices


def _with_configs(saved: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint with hyper-parameters as configs of omegaconf, where they were that and it is installed."""
    for prefix in ("", "datamodule_"):
        if saved.get(f"{prefix}hparams_type") == "omegaconf" and importlib.util.find_spec("omegaconf"):
            omegaconf = importlib.import_module("omegaconf")
            config = saved[f"{prefix}hyper_parameters"] = omegaconf.OmegaConf.create(saved[f"{prefix}hyper_parameters"])
            saved[f"{prefix}hparams_type"] = type(config)
    return saved


@functools.cache
def teach_loading() -> None:
    """Let `torch.load`, and so Lightning's `load_from_checkpoint`, read hasten's checkpoints in this process."""
    from hasten.trainer.checkpoint.files import is_hasten, read

    load = torch.load

    @functools.wraps(load)
    def load_either(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        path = f if isinstance(f, str | os.PathLike) else getattr(f, "name", None)
        if isinstance(path, str | os.PathLike) and is_hasten(path):
            saved = read(Path(path), map_location if isinstance(map_location, str | torch.device) else "cpu")
            return _with_configs(saved)
        return load(f, map_location, *args, **kwargs)

    torch.load = load_either
