"""Stand-ins for the strategy, precision plugin, accelerator and connectors, which Lightning's classes read."""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
from typing import TYPE_CHECKING, Any

import torch

from hasten.trainer import setting_up
from hasten.trainer.lightning import tuning
from hasten.trainer.lightning.names import packages
from hasten.trainer.steps import CountedOptimizer

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer


def reads(path: str) -> Any:
    """Return a property that reads a dotted path of the trainer."""
    read = operator.attrgetter(path)
    return property(lambda part: read(part._trainer))


def sets(path: str) -> Any:
    """Return a property that reads and sets a dotted path of the trainer."""
    owner, _, name = path.rpartition(".")
    read, owner_of = operator.attrgetter(path), operator.attrgetter(owner)
    return property(lambda part: read(part._trainer), lambda part, value: setattr(owner_of(part._trainer), name, value))


def flag(name: str) -> Any:
    """Return a property that reads and sets a flag of the trainer."""

    def change(part: Part, value: Any) -> None:
        part._trainer.configure(**{name: value})

    return property(lambda part: getattr(part._trainer.config, name), change)


class Part:
    """Base class of the stand-ins."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def trainer(self) -> Trainer:
        """The trainer."""
        return self._trainer


class NoOpPart:
    """Stand-in for an object that hasten has no use for: calling any of its methods does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class Strategy(Part):
    """Stand-in for `trainer.strategy`, as far as Lightning's classes read it."""

    launcher = None
    checkpoint_io = None
    handles_gradient_accumulation = False
    before_step: list[Any] = []  # noqa: RUF012  # hooks; `Face.optimizers` sets them
    root_device = reads("device")
    is_global_zero = reads("is_global_zero")
    world_size = reads("world_size")
    global_rank = reads("global_rank")
    local_rank = reads("local_rank")
    node_rank = reads("node_rank")
    model = lightning_module = reads("model")
    precision_plugin = reads("precision_plugin")
    lr_scheduler_configs = sets("engine.optimizing.schedulers")
    _lightning_optimizers = reads("engine.optimizing.counted")

    @property
    def optimizers(self) -> list[Any]:
        return self._trainer.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        engine = self._trainer.engine
        before = engine.hooks.of("on_before_optimizer_step")
        counted = [CountedOptimizer(optimizer, self._trainer, before) for optimizer in optimizers]
        engine.optimizing.optimizers, engine.optimizing.counted = optimizers, engine.guest.optimizers(counted)

    def setup_optimizers(self, trainer: Any) -> None:
        setting_up.optimizers(self._trainer)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        return CountedOptimizer(optimizer, self._trainer, self.before_step).step(closure, **kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._trainer.backward(closure_loss, *args, **kwargs)
        return closure_loss

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        if self._trainer.world.size == 1 or not isinstance(tensor, torch.Tensor):
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
            write(filepath, checkpoint, self._trainer.config.checkpoint_format)

    def model_sharded_context(self) -> Any:
        return contextlib.nullcontext()


class Precision(Part):
    """Stand-in for `trainer.precision_plugin`; see `precision_of`."""

    precision = reads("engine.precision.name")

    @property
    def _desired_input_dtype(self) -> torch.dtype:
        return self._trainer.engine.precision.compute or torch.float32

    def clip_gradients(self, optimizer: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: Any = None) -> None:
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        algorithm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm) or "norm")
        self._trainer.engine.strategy.clip(optimizer, clip_val, algorithm)


def precision_of(trainer: Trainer) -> Precision:
    """Return a stand-in that is an instance of Lightning's class for the trainer's precision, which code checks."""
    return _precision_kind(packages()[0].__name__, trainer.engine.precision.name)(trainer)


@functools.cache
def _precision_kind(package: str, precision: str) -> type[Precision]:
    """Return the stand-in's class, derived from Lightning's."""
    names = {"64-true": "DoublePrecision", "bf16-true": "HalfPrecision", "16-true": "HalfPrecision"}
    name = "MixedPrecision" if precision.endswith("-mixed") else names.get(precision, "Precision")
    kind = getattr(importlib.import_module(f"{package}.plugins.precision"), name)
    return type(name, (Precision, kind), {})


class Accelerator(Part):
    """Stand-in for `trainer.accelerator`."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        if torch.device(device).type == "cuda":
            return torch.cuda.memory_stats(device)
        import psutil

        return {
            "cpu_percent": psutil.cpu_percent(),
            "cpu_vm_percent": psutil.virtual_memory().percent,
            "cpu_swap_percent": psutil.swap_memory().percent,
        }


class LoggerConnector(Part):
    """Stand-in for Lightning's logger connector, which collects logged values."""

    _current_fx: str | None = None
    _first_loop_iter: bool | None = None

    @property
    def should_update_logs(self) -> bool:
        trainer = self._trainer
        every = trainer.config.log_every_n_steps
        return bool(every and (trainer.logged_steps + 1) % every == 0) or (bool(every) and trainer.should_stop)

    def should_reset_tensors(self, fx: str) -> bool:
        return False

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self._trainer.log(metrics, step)


class AcceleratorConnector(Part):
    """Stand-in for Lightning's accelerator connector, which chose the devices."""

    use_distributed_sampler = reads("config.use_distributed_sampler")

    @property
    def is_distributed(self) -> bool:
        return self._trainer.world_size > 1


class CheckpointConnector(Part):
    """Stand-in for Lightning's checkpoint connector, which saves."""

    def restore(self, path: Any, weights_only: bool | None = None) -> None:
        tuning.restore(self._trainer, path)

    def dump_checkpoint(self, weights_only: bool = False) -> dict[str, Any]:
        return self._trainer.checkpointing.collected(weights_only)

    @property
    def _loaded_checkpoint(self) -> dict[str, Any]:
        return self._trainer.checkpointing.loaded or {}
