"""Whether a module has what it takes, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hasten.trainer.hooks import overridden

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer


def check(trainer: Trainer, fn: str) -> None:
    """Raise where the module cannot do what is asked of it."""
    module = type(trainer.model).__name__
    needed = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
    if fn == "predict":
        if not trainer.has_step("predict_step") and type(trainer.model).forward is torch.nn.Module.forward:
            raise trainer.misconfigured(f"{module} has neither predict_step nor forward", "define one of them")
        return
    if not trainer.has_step(needed[fn]):
        raise trainer.misconfigured(f"{module} has no {needed[fn]}, which {fn}() runs", "define it")
    if fn == "fit":
        if not trainer.has_step("configure_optimizers"):
            raise trainer.misconfigured(f"{module} has no configure_optimizers", "define it, and return an optimizer")
        _check_validation(trainer, module)
        if not trainer.model.automatic_optimization:
            if trainer.gradient_clip_val:
                raise trainer.misconfigured(
                    f"gradient_clip_val={trainer.gradient_clip_val} does nothing in manual optimization",
                    "call self.clip_gradients(optimizer, ...) in training_step",
                )
            if trainer.accumulate_grad_batches != 1:
                raise trainer.misconfigured(
                    f"accumulate_grad_batches={trainer.accumulate_grad_batches} does nothing in manual optimization",
                    "step the optimizer every so many batches yourself",
                )


def _check_validation(trainer: Trainer, module: str) -> None:
    loader = trainer.loaders.get("val") is not None or _defines(trainer, "val_dataloader")
    step = trainer.has_step("validation_step")
    if loader and not step:
        trainer.warn(f"there is a validation loader, but {module} has no validation_step: validation is skipped")
    if step and not loader:
        trainer.warn(f"{module} has a validation_step, but there is no validation loader: validation is skipped")


def _defines(trainer: Trainer, hook: str) -> bool:
    of_datamodule = trainer.datamodule is not None and overridden(
        trainer.datamodule, hook, *trainer.bases("datamodule")
    )
    return of_datamodule or overridden(trainer.model, hook, *trainer.bases("module"))
