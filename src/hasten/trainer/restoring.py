"""Restores a training from the contents of a checkpoint: the model first, then, in `fit`, the rest of its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hasten.errors import HastenError
from hasten.trainer.adapter import offered
from hasten.trainer.callbacks.base import state_key

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer

_NEW_OPTIONS = {"decoupled_weight_decay", "fused", "foreach", "capturable", "differentiable", "maximize", "initial_lr"}
"""Options of an optimizer's groups that a checkpoint may lack: newer torch versions, or a scheduler, add them."""


class OtherModelError(HastenError, RuntimeError):
    """The checkpoint is of another model; also a RuntimeError, as torch raises for a state_dict that does not fit."""


def restore_model(trainer: Trainer, state: dict[str, Any], path: str) -> None:
    """Restore weights, and the states of module, datamodule and callbacks.

    Args:
        trainer: The Trainer.
        state: The contents of the checkpoint.
        path: Its file, for messages.
    """
    if "state_dict" not in state:
        raise HastenError(f"{path} has no state_dict", "it is not a checkpoint of a training")
    hooks, module = trainer.engine.hooks, trainer.model
    datamodule = trainer.datamodule
    if datamodule is not None:
        saved = state.get(type(datamodule).__qualname__)
        if saved is not None and (hook := hooks.of_datamodule("load_state_dict")) is not None:
            hook(saved)
        if (hook := hooks.of_datamodule("on_load_checkpoint")) is not None:
            hook(state)
    if (hook := hooks.of_module("on_load_checkpoint")) is not None:
        hook(state)
    for technique in trainer.engine.run.techniques_at("prepare"):
        if technique.setting == "64-true":  # before loading: a float32 module would round the weights
            technique.prepare(module)
    try:
        trainer.engine.strategy.load_model(module, state["state_dict"], module.strict_loading)
    except RuntimeError as error:
        if "Error(s) in loading state_dict" not in str(error):
            raise
        raise OtherModelError(
            f"{path} is a checkpoint of another model than {type(module).__name__}: {error}",
            "resume with the module that was trained, or start from the beginning in another folder",
        ) from None
    if trainer.stage.fn != "fit" and not trainer.engine.guest.loads_callbacks:
        return
    for hook in hooks.of_callbacks("on_load_checkpoint"):
        hook(state)
    if trainer.stage.fn == "fit":
        _restore_callbacks(trainer, state, path)


def _restore_callbacks(trainer: Trainer, state: dict[str, Any], path: str) -> None:
    """Restore the callbacks' states; warn of states that no callback takes."""
    states = dict(state.get("callbacks") or {})
    for callback in trainer.callbacks:
        key = state_key(callback)
        legacy = getattr(callback, "_legacy_state_key", None)
        saved = states.pop(key, None) or (states.pop(legacy, None) if legacy is not None else None)
        if saved is not None:
            callback.load_state_dict(saved)
    left = [key for key in states if isinstance(key, str)]
    if left:
        trainer.warn(
            f"{path} has states of callbacks that this Trainer does not have, and they are left out."
            f" Please add the following callbacks: {left}"
        )


def restore_training(trainer: Trainer, state: dict[str, Any], path: str) -> dict[str, Any] | None:
    """Restore optimizers, schedulers, techniques and counters; arguments as for `restore_model`.

    Returns:
        The loop's position to resume at; None if the checkpoint has none.
    """
    if "optimizer_states" not in state:
        if trainer.stage.fn == "fit":
            raise KeyError(
                f"{path} holds weights only (save_weights_only=True): training cannot go on from it; load the"
                " weights with load_from_checkpoint instead"
            )
        return None
    engine, progress = trainer.engine, trainer.progress
    schedulers = [config.scheduler for config in engine.optimizing.schedulers]
    optimizers = engine.optimizing.optimizers
    _restore_all(trainer, path, "optimizers", optimizers, state["optimizer_states"], engine.strategy.load_optimizer)
    engine.strategy.load_state_dict(state.get("strategy") or {})
    if schedulers:  # none: a callback with its own scheduler (stochastic weight averaging) has removed the module's
        _restore_all(trainer, path, "schedulers", schedulers, state.get("lr_schedulers", []), _load)
    for technique in engine.run.techniques:
        technique.load_state_dict((state.get("techniques") or {}).get(technique.name, {}))
    progress.global_step = state["global_step"]
    trainer.metrics.callback.update(state.get("metrics") or {})
    engine.guest.restore(state)
    loops = state.get("loops") or {}
    if "hasten" not in loops:  # saved before training began, or by another framework
        by_hasten = "hasten_version" in loops
        progress.current_epoch = state["epoch"] if by_hasten else _foreign_epochs(trainer, state, path)
        _check_epochs(trainer, progress.current_epoch)
        return None
    resumed: dict[str, Any] = loops["hasten"]
    progress.load_state_dict(resumed)
    _check_epochs(trainer, progress.epochs_processed)
    return resumed


def _restore_all(
    trainer: Trainer, path: str, kind: str, owners: list[Any], states: list[Any], load: Callable[[Any, Any], None]
) -> None:
    if len(owners) != len(states):
        raise trainer.misconfigured(
            f"{path} has the states of {len(states)} {kind}, configure_optimizers gave {len(owners)}",
            "resume with the module that was trained, or load only its weights",
        )
    for owner, saved in zip(owners, states, strict=True):
        _check_same(trainer, path, owner, saved)
        load(owner, saved)


def _check_same(trainer: Trainer, path: str, owner: Any, saved: Any) -> None:
    """Raise if a state is of another class of optimizer; print it if the checkpoint's learning rate replaces a new one.

    torch would load such a state without complaint, and fail in the first step.
    """
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    groups_now = getattr(owner, "param_groups", None)
    if not groups or not groups_now:
        return
    if missing := {name for name in groups_now[0] if name not in groups[0]} - _NEW_OPTIONS:
        raise trainer.misconfigured(
            f"{path} has the state of another optimizer than {type(owner).__name__}: it has no"
            f" {', '.join(sorted(missing))}",
            "resume with the optimizer that the training began with, or load only the weights",
        )
    before, after = groups_now[0].get("lr"), groups[0].get("lr")
    if before != after and not trainer.engine.optimizing.schedulers and isinstance(before, float):
        trainer.say(f"the optimizer continues with lr={after} of the checkpoint, not {before}")


def _check_epochs(trainer: Trainer, epochs: int) -> None:
    """Raise if the checkpoint has done more epochs than `max_epochs`."""
    limit = trainer.config.max_epochs
    if limit is not None and -1 != limit < epochs:
        raise trainer.misconfigured(
            f"You restored a checkpoint with current_epoch={epochs}, but you have set Trainer(max_epochs={limit})",
            f"say max_epochs={epochs + 1} or more to continue, or fit without ckpt_path to start again",
        )


def _foreign_epochs(trainer: Trainer, state: dict[str, Any], path: str) -> int:
    """Return the epochs done in another framework's checkpoint; an epoch that was cut short is repeated."""
    writer = next(adapter for adapter in offered() if adapter.wrote(state))
    trainer.warn(
        f"{path} was written by {writer.name}: weights, optimizers and schedulers go on exactly, the position"
        " within an epoch does not"
    )
    return writer.epochs_done(state, trainer.progress)


def _load(owner: Any, state: Any) -> None:
    owner.load_state_dict(state)
