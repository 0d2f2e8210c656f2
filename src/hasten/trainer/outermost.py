"""Finds the outermost modules that a training step calls, so that techniques can change them as `hasten run` would."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hasten.run import Run
    from hasten.trainer.steps import Step


def found_in(step: Step, module: torch.nn.Module, run: Run, keep: Callable[[list[str]], None]) -> Step:
    """Return a step that looks, once, which modules it calls, and lets the techniques change those behind it.

    The first step runs unchanged; what `model(x)` is, the module itself or a part of it, is known only then.

    Args:
        step: The step.
        module: The module that it is of.
        run: Whose techniques change modules.
        keep: Gets the names of those that were called.
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
            # A checkpointed block that runs again within a backward calls its layers, which are not outermost.
            return called not in skipped and torch._C._current_graph_task_id() == -1

        skipped = {part for part in module.modules() if hasattr(part, "compute") and hasattr(part, "_forward_cache")}
        handles = []
        for part in module.modules():
            handles.append(part.register_forward_pre_hook(enter))
            handles.append(part.register_forward_hook(leave, always_call=True))
        try:
            return step(batch, batch_idx, opens, closes)
        finally:
            for handle in handles:
                handle.remove()
            names = {id(part): name for name, part in module.named_modules()}
            keep([names[id(called)] for called, _ in calls.values()])
            for called, args in calls.values():
                run.model(called, args)

    return first
