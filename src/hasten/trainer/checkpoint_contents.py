"""Collects the contents of a training's checkpoint."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hasten.trainer.callbacks.base import state_key

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer


def contents(trainer: Trainer, begun: float, weights_only: bool = False) -> dict[str, Any]:
    """Return the contents of a checkpoint, under keys that other tools know where such keys exist.

    Every process must call this. With a sharded model (FSDP), rank 0 gets full tensors, and the other ranks get tensors
    without memory in their place.

    Args:
        trainer: The Trainer.
        begun: The time at which its `fit` began.
        weights_only: Leave out what is only needed to resume.
    """
    engine = trainer.engine
    strategy, keep = engine.strategy, trainer.is_global_zero
    module = trainer.model
    if module is None:
        raise AttributeError(
            "Saving a checkpoint is only possible if a model is attached: call fit, validate or test first"
        )
    state: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "state_dict": strategy.full_state(module.state_dict(), keep),
        "loops": _loops(trainer, begun),
    }
    if not weights_only:
        state["callbacks"] = _callback_states(trainer)
        state["optimizer_states"] = [
            strategy.optimizer_state(optimizer, keep) for optimizer in engine.optimizing.optimizers
        ]
        state["lr_schedulers"] = [config.scheduler.state_dict() for config in engine.optimizing.schedulers]
        more = {
            "techniques": {
                technique.name: saved for technique in engine.run.techniques if (saved := technique.state_dict())
            },
            "metrics": dict(trainer.callback_metrics),
            "strategy": strategy.state_dict(),
        }
        state.update({key: saved for key, saved in more.items() if saved})
    for owner in (trainer.datamodule, module):
        hparams = getattr(owner, "hparams", None)
        if owner is not None and hparams:
            key = "datamodule_hyper_parameters" if owner is trainer.datamodule else "hyper_parameters"
            state[key.replace("hyper_parameters", "hparams_name")] = getattr(owner, "_hparams_name", "kwargs")
            state[key] = dict(hparams)
    engine.guest.saved(state, weights_only)
    datamodule, hooks = trainer.datamodule, engine.hooks
    if not weights_only and (hook := hooks.of_datamodule("state_dict")) is not None and (saved := hook()):
        state[type(datamodule).__qualname__] = saved
    # Even a weights-only checkpoint goes through callbacks that average weights (EMA), as they replace its weights.
    averaging = [callback for callback in trainer.callbacks if getattr(callback, "changes_saved_weights", False)]
    for hook in hooks.of_callbacks("on_save_checkpoint", among=averaging if weights_only else None):
        hook(state)
    for hook in (hooks.of_datamodule("on_save_checkpoint"), hooks.of_module("on_save_checkpoint")):
        if hook is not None:
            hook(state)
    gathered: dict[str, Any] = strategy.full_state(state, keep)  # for what callbacks added, such as averaged weights
    return gathered


def _loops(trainer: Trainer, begun: float) -> dict[str, Any]:
    """Return hasten's version, the start time of `fit`, and the loop's position."""
    loop = trainer.engine.loop
    version = {"hasten_version": sys.modules["hasten"].__version__, "begun": begun}
    return version if loop is None else {**version, "hasten": loop.state_dict()}


def _callback_states(trainer: Trainer) -> dict[str, Any]:
    """Return the callbacks' states that are not empty, by state key."""
    states = {}
    for callback in trainer.callbacks:
        state_dict = getattr(callback, "state_dict", None)  # a callback may be any object with hooks
        if saved := state_dict() if callable(state_dict) else None:
            states[state_key(callback)] = saved
    return states
