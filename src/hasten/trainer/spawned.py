"""Stages that run in processes forked or spawned from this one (`ddp_fork`, `ddp_notebook`, `ddp_spawn`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hasten.parallel import choose_devices, find_place, spawn
from hasten.trainer.batches import mapped

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer


def starts_processes(trainer: Trainer) -> bool:
    """Return whether a run goes to processes that are started from this one, and this is none of them."""
    if not trainer.engine.strategy.starts_here or find_place() is not None:
        return False
    return _size(trainer) > 1


def _size(trainer: Trainer) -> int:
    return len(choose_devices(trainer.config.accelerator, trainer.config.devices))


def run(stage: Callable[..., Any], trainer: Trainer, fn: str, path: str | None, options: dict[str, Any]) -> Any:
    """Run a stage in other processes, and bring its results back: weights, counters, metrics, states of callbacks.

    Args:
        stage: Runs it in one process; a function of a module, so that it can be pickled.
        trainer: Whose stage it is.
        fn: Which: "fit", "validate", "test" or "predict".
        path: The checkpoint to begin from.
        options: What else `stage` takes.
    """
    start = trainer.engine.strategy.starts_here
    got = spawn(_in_rank, _size(trainer), (stage, trainer, fn, path, options), strategy=start)
    if got["weights"] is not None:
        trainer.model.load_state_dict(got["weights"])
    trainer.metrics.callback, trainer.metrics.logged, trainer.metrics.bar = got["metrics"]
    trainer.progress.take(got["progress"])
    trainer.stage.fn, trainer.stage.stage, trainer.stage.status = fn, None, "finished"
    for callback, kept in zip(trainer.callbacks, got["callbacks"], strict=True):
        state, folder = kept
        if folder and getattr(callback, "dirpath", None) is None:
            callback.dirpath = folder  # where the ranks saved
        if state:
            callback.load_state_dict(state)
    return got["answer"]


def _in_rank(
    stage: Callable[..., Any], trainer: Trainer, fn: str, path: str | None, options: dict[str, Any]
) -> dict[str, Any]:
    answer = stage(trainer, fn, path, **options)
    metrics = trainer.metrics
    return {
        "answer": answer,
        "weights": _on_cpu(trainer.model.state_dict()) if fn == "fit" else None,
        "metrics": [_on_cpu(values) for values in (metrics.callback, metrics.logged, metrics.bar)],
        "progress": trainer.progress,
        "callbacks": [
            (_on_cpu(one.state_dict()) if hasattr(one, "state_dict") else {}, getattr(one, "dirpath", None))
            for one in trainer.callbacks
        ],
    }


def _on_cpu(state: Any) -> Any:
    return mapped(state, torch.Tensor, lambda tensor: tensor.detach().cpu())
