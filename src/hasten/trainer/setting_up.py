"""Sets up a run before its first batch: data, loggers, the module on its device, optimizers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from hasten.parallel import sync_batchnorm
from hasten.trainer import rank_checks
from hasten.trainer.attachments import SilentLogger
from hasten.trainer.optimizing import parsed
from hasten.trainer.steps import CountedOptimizer

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer


def prepare_data(trainer: Trainer) -> None:
    """Call `prepare_data` once per machine, or once overall, while the other processes wait."""
    hooks, world = trainer.engine.hooks, trainer.engine.world
    for owner, own in (
        (trainer.datamodule, hooks.of_datamodule("prepare_data")),
        (trainer.model, hooks.of_module("prepare_data")),
    ):
        if own is None:
            continue
        each_node = getattr(owner, "prepare_data_per_node", True)
        if world.local_rank == 0 if each_node else world.rank == 0:
            own()
        world.barrier("prepare_data")


def open_loggers(trainer: Trainer) -> None:
    """Open the loggers' files early, so that their folders exist for everything that follows.

    Weights & Biases comes first: it mirrors TensorBoard's files only if it has started before them.
    """
    for logger in sorted(trainer.loggers, key=lambda logger: type(logger).__name__ != "WandbLogger"):
        if not isinstance(logger, SilentLogger) and hasattr(type(logger), "experiment"):
            _ = logger.experiment


def to_device(trainer: Trainer) -> None:
    """Apply process-wide techniques and flags, then move the module to its device and into its precision."""
    engine, config = trainer.engine, trainer.config
    model, run = engine.model, engine.run
    if not engine.processed:
        engine.processed = True
        run.process()
    else:  # a later run: techniques that were restored after the last one act again
        for technique in run.techniques_at("restore"):
            if technique.active:
                technique.process()
    if config.deterministic is not None:
        if config.deterministic and trainer.device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch requires it for deterministic cuBLAS
        torch.use_deterministic_algorithms(bool(config.deterministic), warn_only=config.deterministic == "warn")
    if config.benchmark is False:
        torch.backends.cudnn.benchmark = False
    if config.sync_batchnorm and engine.world.size == 1:
        trainer.say("sync_batchnorm=True is of no use here: there is one process", once=True)
    elif config.sync_batchnorm:
        engine.model = model = sync_batchnorm(model, engine.world)
    engine.strategy.to_device(model, trainer.device)
    for technique in run.techniques:
        prepare = getattr(technique, "prepare", None)
        if prepare is not None:
            prepare(model)
    engine.strategy.prepare(model, engine.world, engine.precision)


def optimizers(trainer: Trainer) -> None:
    """Build optimizers and schedulers, and wrap the model for distributed training."""
    engine, model = trainer.engine, trainer.model
    hooks, optimizing = engine.hooks, engine.optimizing
    hook = hooks.of_module("configure_optimizers")
    optimizing.optimizers, configs = parsed(
        hook() if hook is not None else model.configure_optimizers(),
        model.automatic_optimization,
        hooks.of_module("lr_scheduler_step") is not None,
        trainer.misconfigured,
    )
    rank_checks.check_optimizers(trainer, optimizing.optimizers)
    for optimizer in optimizing.optimizers:
        engine.run.optimizer(optimizer)
    engine.strategy.optimizers(optimizing.optimizers, engine.world)
    before = hooks.of("on_before_optimizer_step")
    counted = [CountedOptimizer(optimizer, trainer, before) for optimizer in optimizing.optimizers]
    optimizing.counted = engine.guest.optimizers(counted)
    optimizing.schedulers = engine.guest.scheduler_configs(configs)
    engine.strategy.wrap(model, engine.world)


def log_hparams(trainer: Trainer) -> None:
    """Send the hyper-parameters of module and datamodule to the loggers."""
    model, datamodule = trainer.model, trainer.datamodule
    hparams_of = [
        dict(getattr(owner, "hparams_initial", None) or owner.hparams)
        for owner in (model, datamodule)
        if owner is not None and getattr(owner, "_log_hyperparams", False)
    ]
    model_has, data_has = hparams_of if len(hparams_of) == 2 else ({}, {})
    if differ := [str(name) for name in model_has.keys() & data_has if not _same(model_has, data_has, name)]:
        raise RuntimeError(
            f"Error while merging hparams: module and datamodule both have {sorted(differ)}, with different values:"
            " loggers could show only one of them"
        )
    hparams = {name: value for owner_hparams in hparams_of for name, value in owner_hparams.items()}
    for logger in trainer.loggers:
        if hparams:
            logger.log_hyperparams(hparams)
        if hasattr(logger, "log_graph"):
            logger.log_graph(model)
        logger.save()


def _same(first: dict[str, Any], second: dict[str, Any], name: str) -> bool:
    """Return whether a hyper-parameter is equal in both dicts; arrays and tensors must be the same object."""
    value, other = first[name], second[name]
    if value is other or type(value) is not type(other):
        return value is other
    return not hasattr(value, "shape") and bool(value == other)  # `==` of arrays is an array
