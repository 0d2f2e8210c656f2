"""Runs a stage in processes forked or spawned from this one (`ddp_fork`, `ddp_notebook`, `ddp_spawn`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hasten.parallel import choose_devices, find_place, spawn
from hasten.trainer.batches import mapped

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer


def must_start_ranks(trainer: Trainer) -> bool:
    """Return whether this process must start the ranks of a run: the strategy says so, and it is not a rank itself."""
    if not trainer.engine.strategy.starts_here or find_place() is not None:
        return False
    return _size(trainer) > 1


def _size(trainer: Trainer) -> int:
    """Return the number of ranks."""
    return len(choose_devices(trainer.config.accelerator, trainer.config.devices))


def run(stage: Callable[..., Any], trainer: Trainer, fn: str, path: str | None, options: dict[str, Any]) -> Any:
    """Run a stage in other processes, and copy back its results: weights, counters, metrics, callbacks' states.

    Args:
        stage: Runs the stage in one rank; a module-level function, so that it can be pickled.
        trainer: The Trainer.
        fn: "fit", "validate", "test" or "predict".
        path: The checkpoint to load.
        options: Further arguments of `stage`.
    """
    start = trainer.engine.strategy.starts_here
    results = spawn(_in_rank, _size(trainer), (stage, trainer, fn, path, options), strategy=start)
    if results["weights"] is not None:
        trainer.model.load_state_dict(results["weights"])
    trainer.metrics.callback, trainer.metrics.logged, trainer.metrics.bar = results["metrics"]
    trainer.progress.take(results["progress"])
    trainer.stage.fn, trainer.stage.stage, trainer.stage.status = fn, None, "finished"
    for callback, returned in zip(trainer.callbacks, results["callbacks"], strict=True):
        state, folder = returned
        if folder and getattr(callback, "dirpath", None) is None:
            callback.dirpath = folder  # chosen by the ranks
        if state:
            callback.load_state_dict(state)
    return results["answer"]


def _in_rank(
    stage: Callable[..., Any], trainer: Trainer, fn: str, path: str | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Run the stage in a rank; return its results on the CPU, to be pickled."""
    answer = stage(trainer, fn, path, **options)
    metrics = trainer.metrics
    return {
        "answer": answer,
        "weights": _on_cpu(trainer.model.state_dict()) if fn == "fit" else None,
        "metrics": [_on_cpu(values) for values in (metrics.callback, metrics.logged, metrics.bar)],
        "progress": trainer.progress,
        "callbacks": [
            (
                _on_cpu(callback.state_dict()) if hasattr(callback, "state_dict") else {},
                getattr(callback, "dirpath", None),
            )
            for callback in trainer.callbacks
        ],
    }


def _on_cpu(state: Any) -> Any:
    return mapped(state, torch.Tensor, lambda tensor: tensor.detach().cpu())
