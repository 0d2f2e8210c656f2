"""Trial fits in this process: a copy of the module, and a Trainer with the same techniques that writes nothing."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from hasten.errors import HastenError, is_out_of_memory
from hasten.parallel import find_place
from hasten.trainer.errors import misconfigured
from hasten.trainer.hooks import overridden

if TYPE_CHECKING:
    from hasten.trainer.callbacks.base import Callback
    from hasten.trainer.trainer import Trainer

_HOOKS = {"train": "train_dataloader", "val": "val_dataloader"}
TRIED: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "profiler": None,
    "fast_dev_run": False,
    "overfit_batches": 0.0,
    "barebones": False,
    "num_sanity_val_steps": 0,
    "max_steps": -1,
    "min_steps": None,
    "min_epochs": None,
    "max_time": None,
    "val_check_interval": None,
    "check_val_every_n_epoch": 1,
    "devices": 1,
    "num_nodes": 1,
    "strategy": "auto",
    "seed": None,
}
"""Flags of a trial Trainer that differ from the user's."""

Change = Callable[[Any, str], Any]
"""Called with loaders and their kind, "train" or "val"; returns the loaders for a trial."""


def refuse_to_try(trainer: Trainer, method: str, instead: str) -> None:
    """Refuse where a trial fit cannot run in this process.

    Args:
        trainer: The user's Trainer.
        method: The method that was called, for the message.
        instead: What to do in one of several processes, for the message.

    Raises:
        HastenError: This is one of several processes, or the Trainer is running.
    """
    if (place := find_place()) is not None and place.size > 1:
        raise HastenError(f"{method} trains in one process, and this is one of several", instead)
    if trainer.stage.status == "running":
        raise misconfigured(f"{method}() is called while {trainer.stage.fn}() runs", "call it before")


def trainer_on_trial(trainer: Trainer, flags: dict[str, Any], callback: Callback, folder: str) -> Any:
    """Return a Trainer with the same techniques and precision that writes nothing and has one callback."""
    user_config = trainer.user_config
    all_flags = {flag.name: getattr(user_config, flag.name) for flag in fields(user_config)} | flags
    all_flags |= {"callbacks": [callback], "default_root_dir": folder}
    if trainer.device.type == "cuda":
        all_flags["devices"] = [trainer.device.index or 0]  # the Trainer's device, not the machine's first
    if all_flags["plan"] == "auto":
        all_flags["plan"] = None
    trial = type(trainer)(**all_flags)
    trial.say = trial.warn = _nothing  # type: ignore[method-assign]
    return trial


def with_datamodule(fit: dict[str, Any], loaders: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `fit` and `loaders`, with a datamodule passed as the training loader moved to `fit["datamodule"]`."""
    first = loaders["train"]
    if fit["datamodule"] is None and hasattr(first, "train_dataloader") and hasattr(first, "prepare_data"):
        return {**fit, "datamodule": first}, dict.fromkeys(loaders)
    return fit, loaders


def copied_fit(trainer: Trainer, fit: dict[str, Any], loaders: dict[str, Any], change: Change) -> dict[str, Any]:
    """Return the arguments for a trial `fit`: copies of the module, loss and optimizer, and changed loaders.

    Args:
        trainer: The user's Trainer.
        fit: The arguments of its `fit`, without loaders.
        loaders: "train" and "val" loaders, or None where hooks return them.
        change: Applied to these loaders, and to those that hooks return.

    Raises:
        HastenError: The module cannot be copied.
    """
    fit, model = dict(fit), fit["model"]
    model = fit["model"] = getattr(model, "_orig_mod", model)
    # A module that was trained before refers to its Trainer, which must not be copied with it.
    attached_trainer = vars(model).pop("_trainer", None) if isinstance(model, torch.nn.Module) else None
    try:
        copied = copy.deepcopy({name: fit[name] for name in ("model", "loss", "optimizer")})
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise HastenError(
            f"the module cannot be copied, so it cannot be tried without a change: {type(error).__name__}: {error}",
            "use `hasten batch` on the script",
        ) from error
    finally:
        if attached_trainer is not None:
            vars(model)["_trainer"] = attached_trainer
    fit.update(copied)
    if fit["datamodule"] is not None:
        fit["datamodule"] = copy.copy(fit["datamodule"])
    if hasattr(fit["model"], "configure_callbacks"):
        object.__setattr__(fit["model"], "configure_callbacks", list)  # its callbacks could write files or stop early
    for kind, hook in _HOOKS.items():
        own_loaders = loaders[kind]
        if own_loaders is not None:
            fit[f"{kind}_dataloaders"] = change(own_loaders, kind)
            continue
        for owner_name, owner in (("datamodule", fit["datamodule"]), ("module", fit["model"])):
            if owner is not None and overridden(owner, hook, *trainer.engine.bases(owner_name)):
                object.__setattr__(owner, hook, functools.partial(_changed, getattr(owner, hook), change, kind))
    return fit


def _changed(plain: Callable[[], Any], change: Change, kind: str) -> Any:
    """Return the loaders of a hook, changed."""
    return change(plain(), kind)


def _nothing(*_: Any, **__: Any) -> None:
    """Print nothing: a stand-in for a trial Trainer's messages."""
