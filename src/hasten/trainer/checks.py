"""Checks that module, flags and callbacks fit together, before anything runs."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch

from hasten.trainer.hooks import overridden
from hasten.trainer.loss_module import LossModule

if TYPE_CHECKING:
    from hasten.trainer.engine import Engine
    from hasten.trainer.trainer import Trainer


_OLD_HOOKS = {
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
"""Hooks from before version 2.0 that are not called any more -> the hook to define instead."""


_LOST_OUTPUTS = ("training_epoch_end", "validation_epoch_end", "test_epoch_end")
"""Old hooks that usually compute metrics, so they are an error. Many modules still define the others: a warning."""


def _refuse_old_hooks(trainer: Trainer) -> None:
    """Raise or warn if a module, datamodule or callback defines a hook that is not called any more."""
    for owner in (trainer.model, trainer.datamodule, *trainer.callbacks):
        for old, new in _OLD_HOOKS.items():
            if not callable(getattr(type(owner), old, None)):
                continue
            text = (
                f"{type(owner).__name__}.{old} is a hook of earlier years, which is not called any more: define {new}"
            )
            if old in _LOST_OUTPUTS:
                raise NotImplementedError(f"{text}; outputs that it needs are kept by yourself in the step")
            trainer.warn(text)


def check(trainer: Trainer, fn: str) -> None:
    """Raise if the module lacks what `fn` needs; warn of flags and loaders that have no effect."""
    _refuse_old_hooks(trainer)
    module = type(trainer.model).__name__
    needed = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
    if fn == "predict":
        if trainer.model.predict_step is None:
            raise trainer.misconfigured(
                f"{module}: `predict_step` cannot be None.", "leave it out to predict by forward"
            )
        forward = getattr(trainer.model.forward, "__func__", trainer.model.forward)
        if not trainer.engine.has_step("predict_step") and forward in (None, torch.nn.Module.forward):
            raise trainer.misconfigured(
                f"{module} has no predict_step, so predict() requires `forward` method to run.", "define one of them"
            )
        return
    if not trainer.engine.has_step(needed[fn]):
        raise trainer.misconfigured(f"No `{needed[fn]}()` method defined in {module}: {fn}() runs it", "define it")
    if fn == "fit":
        if not trainer.engine.has_step("configure_optimizers"):
            raise trainer.misconfigured(
                f"No `configure_optimizers()` method defined in {module}", "define it, and return an optimizer"
            )
        _check_validation(trainer, module)
        if trainer.config.gradient_clip_algorithm and not trainer.config.gradient_clip_val:
            if not trainer.engine.has_step("configure_gradient_clipping") and trainer.model.automatic_optimization:
                trainer.say(
                    f"gradient_clip_algorithm={str(trainer.config.gradient_clip_algorithm)!r} is of no use:"
                    " gradient_clip_val is not given",
                    once=True,
                )
        if "optimizer_idx" in inspect.signature(trainer.model.training_step).parameters:
            raise RuntimeError(
                f"{module} is written for a Trainer of earlier years. Remove the `optimizer_idx` argument from"
                " `training_step`: with several optimizers set self.automatic_optimization = False and step them in it"
            )
        if not trainer.model.automatic_optimization:
            _check_manual(trainer)


def _check_manual(trainer: Trainer) -> None:
    """Raise for flags about optimization when the module optimizes manually."""
    config = trainer.config
    if config.gradient_clip_val:
        raise trainer.misconfigured(
            "Automatic gradient clipping is not supported for manual optimization:"
            f" gradient_clip_val={config.gradient_clip_val} would do nothing",
            "call self.clip_gradients(optimizer, ...) in training_step",
        )
    if config.accumulate_grad_batches != 1:
        raise trainer.misconfigured(
            "Automatic gradient accumulation is not supported for manual optimization:"
            f" accumulate_grad_batches={config.accumulate_grad_batches} would do nothing",
            "step the optimizer every few batches yourself",
        )
    if config.optimizer_in_backward:
        raise trainer.misconfigured(
            "optimizer_in_backward=True is not supported for manual optimization: training_step steps its optimizers"
            " itself",
            "leave the flag out",
        )
    if config.microbatch is not None:
        raise trainer.misconfigured(
            f"microbatch={config.microbatch!r} is not supported for manual optimization: training_step differentiates"
            " its batch itself",
            "split the batch there; or let the Trainer optimize",
        )


def _check_validation(trainer: Trainer, module: str) -> None:
    """Warn if there is a validation loader without a step, or a step without a loader."""
    loader = has_loader(trainer.engine, "val")
    step = trainer.engine.has_step("validation_step")
    if loader and not step:
        trainer.warn(
            f"You passed in a `val_dataloader` but have no `validation_step` in {module}: validation is skipped"
        )
    if step and not loader and not isinstance(trainer.model, LossModule):
        trainer.warn(f"You defined a `validation_step` but have no `val_dataloader` in {module}: validation is skipped")


def resolve_limits(trainer: Trainer) -> None:
    """Set `max_epochs` if it was not given, and raise for a minimum above its maximum."""
    config = trainer.config
    if config.max_epochs is None:
        if config.max_steps == -1 and not trainer._callbacks_named("Timer"):
            trainer.warn(
                "`max_epochs` was not set. Setting it to 1000 epochs. -1 trains until something else stops it."
            )
            trainer.configure(max_epochs=1000)
        else:
            trainer.configure(max_epochs=-1)
    for unit in ("epochs", "steps"):
        least, most = getattr(trainer.config, f"min_{unit}"), getattr(trainer.config, f"max_{unit}")
        if least is not None and most != -1 and least > most:
            raise trainer.misconfigured(f"min_{unit}={least} is more than max_{unit}={most}")


def has_loader(engine: Engine, kind: str) -> bool:
    """Return whether loaders of a kind were given, or defined by datamodule or module."""
    return engine.feeds[kind].passed is not None or defines(engine, f"{kind}_dataloader")


def defines(engine: Engine, hook: str) -> bool:
    """Return whether the datamodule or the module defines a data hook."""
    datamodule = engine.datamodule
    of_datamodule = datamodule is not None and overridden(datamodule, hook, *engine.bases("datamodule"))
    return of_datamodule or overridden(engine.model, hook, *engine.bases("module"))
