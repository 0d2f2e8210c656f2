"""Resolves the arguments of `fit`, `validate`, `test` and `predict`: the module, and the weights to load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hasten.trainer.adapter import adapter
from hasten.trainer.errors import NotAModuleError
from hasten.trainer.loss_module import LossModule

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer


def module_of(trainer: Trainer, fn: str, model: Any) -> Any:
    """Return the module to run: the given module, or else the module trained last.

    The plain net of the last `fit(net, loss=...)` counts as given: its LossModule has the steps.
    """
    last = trainer.model
    model = last if model is None or (isinstance(last, LossModule) and model is last.net) else model
    class_names = adapter().kinds_of_module
    if model is None:
        raise TypeError(f"`Trainer.{fn}()` requires a {class_names}: none was given, and none was trained before")
    model = getattr(model, "_orig_mod", model)  # unwrap torch.compile(module)
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "training_step"):
        raise NotAModuleError(
            f"`Trainer.{fn}()`: model must be a {class_names}, got `{type(model).__name__}`",
            "for a plain nn.Module: fit(model, loader, loss=torch.nn.functional.cross_entropy)",
        )
    return model


def weights_of(trainer: Trainer, model: Any, path: str | Path | None) -> str | None:
    """Return the checkpoint whose weights an evaluation loads; None: use the module's current weights."""
    if path is not None or model is not None:
        return trainer.checkpointing.find(path, "evaluate")
    saved = [callback for callback in trainer.checkpoint_callbacks if getattr(callback, "best_model_path", "")]
    if not saved or trainer.fast_dev_run:
        return None
    trainer.warn(
        "no model and no ckpt_path were given: The best model of the previous `fit` call will be used. Say"
        ' ckpt_path="best" if that is meant, or give the model'
    )
    return trainer.checkpointing.find("best")
