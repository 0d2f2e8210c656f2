"""Whether a module has what it takes, before anything runs."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch

from hasten.trainer.hooks import overridden
from hasten.trainer.module import LossModule

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer


_OF_LIGHTNING_1 = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
    "training_step_end": "training_step",
    "validation_step_end": "validation_step",
    "test_step_end": "test_step",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
}
"""Hooks of Lightning 1.x that nobody calls any more, and what to define instead."""


_LOST_OUTPUTS = ("training_epoch_end", "validation_epoch_end", "test_epoch_end")
"""Those among them that compute a training's metrics, as a rule; modules still carry the others about."""


def _refuse_hooks_of_old(trainer: Trainer) -> None:
    """A hook that is never called must not look as if it were."""
    for owner in (trainer.model, trainer.datamodule, *trainer.callbacks):
        for old, new in _OF_LIGHTNING_1.items():
            if not callable(getattr(type(owner), old, None)):
                continue
            text = (
                f"{type(owner).__name__}.{old} is a hook of Lightning 1.x, which is not called any more: define {new}"
            )
            if old in _LOST_OUTPUTS:
                raise NotImplementedError(f"{text}; outputs that it needs are kept by yourself in the step")
            trainer.warn(text)


def _refuse_iterators(trainer: Trainer) -> None:
    """Steps that draw their batches themselves, an experiment of Lightning's, are not called that way here."""
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        if trainer.has_step(name) and "dataloader_iter" in inspect.signature(getattr(trainer.model, name)).parameters:
            raise trainer.misconfigured(
                f"{type(trainer.model).__name__}.{name} takes a dataloader_iter, which hasten's Trainer does not give",
                "take (batch, batch_idx)",
            )


def check(trainer: Trainer, fn: str) -> None:
    """Raise where the module cannot do what is asked of it."""
    _refuse_hooks_of_old(trainer)
    _refuse_iterators(trainer)
    module = type(trainer.model).__name__
    needed = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
    if fn == "predict":
        if trainer.model.predict_step is None:
            raise trainer.misconfigured(
                f"{module}: `predict_step` cannot be None.", "leave it out to predict by forward"
            )
        forward = getattr(trainer.model.forward, "__func__", trainer.model.forward)
        if not trainer.has_step("predict_step") and forward in (None, torch.nn.Module.forward):
            raise trainer.misconfigured(
                f"{module} has no predict_step, so predict() requires `forward` method to run.", "define one of them"
            )
        return
    if not trainer.has_step(needed[fn]):
        raise trainer.misconfigured(f"No `{needed[fn]}()` method defined in {module}: {fn}() runs it", "define it")
    if fn == "fit":
        if not trainer.has_step("configure_optimizers"):
            raise trainer.misconfigured(
                f"No `configure_optimizers()` method defined in {module}", "define it, and return an optimizer"
            )
        _check_validation(trainer, module)
        if trainer.gradient_clip_algorithm and not trainer.gradient_clip_val:
            if not trainer.has_step("configure_gradient_clipping") and trainer.model.automatic_optimization:
                trainer.say(
                    f"gradient_clip_algorithm={str(trainer.gradient_clip_algorithm)!r} is of no use: gradient_clip_val"
                    " is not given",
                    once=True,
                )
        if "optimizer_idx" in inspect.signature(trainer.model.training_step).parameters:
            raise RuntimeError(
                f"{module} is written for Lightning 1.x. Remove the `optimizer_idx` argument from `training_step`: with"
                " several optimizers set self.automatic_optimization = False and step them in it"
            )
        if not trainer.model.automatic_optimization:
            if trainer.gradient_clip_val:
                raise trainer.misconfigured(
                    "Automatic gradient clipping is not supported for manual optimization:"
                    f" gradient_clip_val={trainer.gradient_clip_val} would do nothing",
                    "call self.clip_gradients(optimizer, ...) in training_step",
                )
            if trainer.accumulate_grad_batches != 1:
                raise trainer.misconfigured(
                    "Automatic gradient accumulation is not supported for manual optimization:"
                    f" accumulate_grad_batches={trainer.accumulate_grad_batches} would do nothing",
                    "step the optimizer every so many batches yourself",
                )


def _check_validation(trainer: Trainer, module: str) -> None:
    loader = has_loader(trainer, "val")
    step = trainer.has_step("validation_step")
    if loader and not step:
        trainer.warn(
            f"You passed in a `val_dataloader` but have no `validation_step` in {module}: validation is skipped"
        )
    if step and not loader and not isinstance(trainer.model, LossModule):
        trainer.warn(f"You defined a `validation_step` but have no `val_dataloader` in {module}: validation is skipped")


def has_loader(trainer: Trainer, kind: str) -> bool:
    """Whether loaders of a kind were given, or module or datamodule have them."""
    return trainer.loaders.get(kind) is not None or defines(trainer, f"{kind}_dataloader")


def defines(trainer: Trainer, hook: str) -> bool:
    of_datamodule = trainer.datamodule is not None and overridden(
        trainer.datamodule, hook, *trainer.bases("datamodule")
    )
    return of_datamodule or overridden(trainer.model, hook, *trainer.bases("module"))
