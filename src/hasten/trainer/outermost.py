"""Finds the outermost modules that a training step calls, so techniques change the same modules as `hasten run` does.

A Module often holds the model as a part: `training_step` calls `self.net(x)`, not `self(x)`. Techniques such as compile
must change the module that is called. Only a running step shows which, so hooks record the calls of the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hasten.run import Run
    from hasten.trainer.steps import Step


def record_outermost(step: Step, module: torch.nn.Module, run: Run, keep: Callable[[list[str]], None]) -> Step:
    """Return a step that records which modules it calls, and afterwards lets techniques change them.

    The step itself runs unchanged: which modules are called is known only afterwards.

    Args:
        step: The step.
        module: The step's module.
        run: The Run whose techniques change modules.
        keep: Called with the names of the modules that were called.
    """

    def first(batch: Any, batch_idx: int, opens: bool, closes: bool) -> Any:
        calls: dict[int, tuple[torch.nn.Module, tuple[Any, ...]]] = {}
        depth = [0]

        def enter(called: torch.nn.Module, args: tuple[Any, ...]) -> None:
            if not depth[0] and counts(called):
                calls.setdefault(id(called), (called, args))
            depth[0] += counts(called)

        def leave(called: torch.nn.Module, args: Any, output: Any) -> None:
            depth[0] -= counts(called)

        def counts(called: torch.nn.Module) -> bool:
            # Not within a backward: a checkpointed block recomputed there calls its layers, which are not outermost.
            return called not in skipped and torch._C._current_graph_task_id() == -1

        # Metrics (torchmetrics) are modules too, but no part of the model.
        skipped = {part for part in module.modules() if hasattr(part, "compute") and hasattr(part, "_forward_cache")}
        handles = []
        for part in module.modules():
            handles.append(part.register_forward_pre_hook(_Hook(enter)))
            handles.append(part.register_forward_hook(_Hook(leave), always_call=True))
        try:
            return step(batch, batch_idx, opens, closes)
        finally:
            for handle in handles:
                handle.remove()
            names = {id(part): name for name, part in module.named_modules()}
            own_calls = [
                (called, args) for called, args in calls.values() if id(called) in names
            ]  # still a part of the module
            keep([names[id(called)] for called, _ in own_calls])
            for called, args in own_calls:
                run.model(called, args)

    return first


class _Hook:
    """A hook that does nothing in copies of its module: a first step may copy it, as a teacher for example."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # a copy or pickle gets `nothing` instead


def nothing(*args: Any) -> None:
    """Do nothing; replaces the hook in a copied module."""


def _nothing() -> Callable[..., None]:
    return nothing
