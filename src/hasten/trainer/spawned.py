"""Stages that run in processes forked or spawned from this one (`ddp_fork`, `ddp_notebook`, `ddp_spawn`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hasten.parallel import choose_devices, find_place, spawn
from hasten.trainer.batches import mapped

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer

STRATEGIES = ("ddp_fork", "ddp_notebook", "ddp_spawn")


def strategy_of(trainer: Trainer) -> str:
    """The strategy that starts processes from this one; "" where none does, or this is one of them."""
    name = trainer.strategy_name
    found = next((one for one in STRATEGIES if name.startswith(one)), "")
    if not found or find_place() is not None:
        return ""
    return found if len(choose_devices(trainer.accelerator_flag, trainer.devices)) > 1 else ""


def run(trainer: Trainer, strategy: str, fn: str, path: str | None, options: dict[str, Any]) -> Any:
    """Run a stage in other processes, and bring its results back: weights, counters, metrics, states of callbacks."""
    size = len(choose_devices(trainer.accelerator_flag, trainer.devices))
    got = spawn(_in_rank, size, (trainer, fn, path, options), strategy=strategy)
    if got["weights"] is not None:
        trainer.model.load_state_dict(got["weights"])
    trainer.metrics.callback, trainer.metrics.logged, trainer.metrics.bar = got["metrics"]
    for name, value in got["counters"].items():
        setattr(trainer, name, value)
    trainer.stage.fn, trainer.stage.stage, trainer.stage.status = fn, None, "finished"
    for callback, kept in zip(trainer.callbacks, got["callbacks"], strict=True):
        state, folder = kept
        if folder and getattr(callback, "dirpath", None) is None:
            callback.dirpath = folder  # where the ranks saved
        if state:
            callback.load_state_dict(state)
    return got["answer"]


_COUNTERS = ("current_epoch", "global_step", "total_batches", "logged_steps", "should_stop")


def _in_rank(trainer: Trainer, fn: str, path: str | None, options: dict[str, Any]) -> dict[str, Any]:
    from hasten.trainer import session

    answer = session.run(trainer, fn, path, **options)
    metrics = trainer.metrics
    return {
        "answer": answer,
        "weights": _on_cpu(trainer.model.state_dict()) if fn == "fit" else None,
        "metrics": [_on_cpu(values) for values in (metrics.callback, metrics.logged, metrics.bar)],
        "counters": {name: getattr(trainer, name) for name in _COUNTERS},
        "callbacks": [
            (_on_cpu(one.state_dict()) if hasattr(one, "state_dict") else {}, getattr(one, "dirpath", None))
            for one in trainer.callbacks
        ],
    }


def _on_cpu(state: Any) -> Any:
    return mapped(state, torch.Tensor, lambda tensor: tensor.detach().cpu())
