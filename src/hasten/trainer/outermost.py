"""Finds the outermost modules that a training step calls, so that techniques can change them as `hasten run` would."""

from __future__ import annotations

from typing import Any

import torch

from hasten.run import Run
from hasten.trainer.steps import Step


def found_in(step: Step, module: torch.nn.Module, run: Run) -> Step:
    """A step that looks, once, which modules it calls, and lets the techniques change those behind it.

    The first step runs unchanged; what `model(x)` is, the module itself or a part of it, is known only then.
    """

    def first(batch: Any, batch_idx: int, opens: bool, closes: bool) -> Any:
        calls: dict[int, tuple[torch.nn.Module, tuple[Any, ...]]] = {}
        depth = [0]

        def enter(called: torch.nn.Module, args: tuple[Any, ...]) -> None:
            if not depth[0] and called not in skipped:
                calls.setdefault(id(called), (called, args))
            depth[0] += called not in skipped

        def leave(called: torch.nn.Module, args: Any, output: Any) -> None:
            depth[0] -= called not in skipped

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
            for called, args in calls.values():
                run.model(called, args)

    return first
