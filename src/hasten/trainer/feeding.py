"""Feeds a Trainer: asks for its loaders, makes them ready, and brings batches to the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hasten.loading import with_options
from hasten.parallel import agree_on_batches, distributed_loader
from hasten.trainer import sources
from hasten.trainer.batches import to_device

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer


def setup(trainer: Trainer, kind: str) -> None:
    """Ask for the loaders of a kind and make them ready."""
    limit = {
        "train": trainer.limit_train_batches,
        "val": trainer.limit_val_batches,
        "test": trainer.limit_test_batches,
        "predict": trainer.limit_predict_batches,
    }[kind]
    mode = "max_size_cycle" if kind == "train" else "sequential"
    given = trainer.loaders.get(kind)
    step = "predict_step" if kind == "predict" else {"train": "training", "val": "validation"}.get(kind, kind) + "_step"
    if limit == 0 or (kind in ("val", "test") and not trainer.has_step(step)):
        given = []
    elif given is None:
        own = trainer.hooks.of_data(f"{kind}_dataloader")
        if own is None:
            if kind != "val" or trainer.stage.fn != "fit":
                raise sources.NotALoaderError(
                    f"An invalid dataloader was {_whence(trainer, kind)}: None",
                    f"give one, or define {kind}_dataloader in the module or a datamodule",
                )
            given = []
        else:
            given = own()
            trainer.world.barrier("loaders")
            if given is None:
                sources.check_iterable(None, _whence(trainer, kind))
    sources.refuse_batches(given, f"{kind}_dataloader")
    source = sources.combined(given, mode)
    if kind == "train" and source.mode == "sequential":
        trainer.num_training_batches = source.batches()
        raise ValueError(
            '`FitLoop` does not support CombinedLoader(mode="sequential"): training draws from its loaders together;'
            f" there are {', '.join(mode for mode in sources.MODES if mode != 'sequential')}"
        )
    leaves = []
    for leaf in source.leaves:
        sources.check_iterable(leaf, _whence(trainer, kind))
        leaves.append(_ready(trainer, leaf, kind))
    source.replace(leaves)
    limits = [
        sources.limited(sources.length(leaf), limit, f"limit_{kind}_batches", trainer.misconfigured) for leaf in leaves
    ]
    limits = [agree_on_batches(trainer.world, one) for one in limits]
    source.limits = limits
    setattr(trainer, f"{kind}_source", source)
    if kind == "train":
        trainer.reloaded_at["train"] = trainer.current_epoch
        trainer.num_training_batches = source.batches()
        _set_val_check(trainer)
    else:
        if kind == "val" and (not trainer.sanity_checking or trainer.validates_this_epoch):
            trainer.reloaded_at["val"] = trainer.current_epoch
        setattr(trainer, f"num_{kind}_batches", limits)


def _whence(trainer: Trainer, kind: str) -> str:
    """Where the loaders of a kind come from, for messages."""
    if trainer.loaders.get(kind) is not None or trainer.hooks.of_data(f"{kind}_dataloader") is None:
        argument = f"{kind}_dataloaders" if trainer.stage.fn == "fit" else "dataloaders"
        return f"passed to `Trainer.{trainer.stage.fn}({argument}=...)`"
    owner = trainer.hooks.owner_of_data(f"{kind}_dataloader")
    return f"returned from `{type(owner).__name__}.{kind}_dataloader()`"


def _ready(trainer: Trainer, leaf: Any, kind: str) -> Any:
    if trainer.overfit_batches and kind in ("train", "val"):
        same = sources.overfitting(leaf)
        if same is not leaf:
            trainer.warn(f"requested to overfit but enabled {kind} dataloader shuffling: it is off, for equal batches")
            leaf = same
    if trainer.world.size > 1 and trainer.use_distributed_sampler:
        leaf, text = distributed_loader(
            leaf, trainer.world, train=kind == "train", seed=trainer.seed or 0, repeat=kind != "predict"
        )
        if text:
            trainer.say(text, once=True)
    return with_options(leaf, trainer.run)


def _set_val_check(trainer: Trainer) -> None:
    total, interval = trainer.num_training_batches, trainer.val_check_interval
    if trainer.val_check_seconds is not None:
        return
    if isinstance(interval, int):
        trainer.val_check_batch = interval
        if interval > total and trainer.check_val_every_n_epoch is not None:
            raise ValueError(
                f"val_check_interval={interval} must be less than or equal to the number of the training batches"
                f" ({total:g}): validation would never run; check_val_every_n_epoch=None counts batches over epochs"
            )
    elif math.isinf(total):
        if interval != 1.0:
            raise trainer.misconfigured(
                f"val_check_interval={interval} is a share of a loader whose length is not known", "give an int"
            )
        trainer.val_check_batch = math.inf
    else:
        trainer.val_check_batch = max(1, int(total * interval))
    if trainer.loggers and total < trainer.log_every_n_steps and not trainer.fast_dev_run:
        trainer.warn(
            f"The number of training batches ({total:g}) is smaller than the logging interval"
            f" log_every_n_steps={trainer.log_every_n_steps}: the loggers may never get a step's values"
        )


def preparing(trainer: Trainer, stage: str) -> list[Callable[[Any, int], Any]]:
    """What each batch goes through before a step: hooks that are defined, and the copy to the device."""
    hooks, device = trainer.hooks, trainer.device
    path: list[Callable[[Any, int], Any]] = []
    if (own := hooks.of_data("on_before_batch_transfer")) is not None:
        path.append(own)
    if (move := hooks.of_data("transfer_batch_to_device")) is not None:
        path.append(lambda batch, index: move(batch, device, index))
    elif device.type != "cpu" or trainer.lightning is not None:
        path.append(lambda batch, index: to_device(batch, device))
    if (own := hooks.of_data("on_after_batch_transfer")) is not None:
        path.append(own)
    return path
