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
            handles.append(part.register_forward_pre_hook(_Hook(enter)))
            handles.append(part.register_forward_hook(_Hook(leave), always_call=True))
        try:
            return step(batch, batch_idx, opens, closes)
        finally:
            for handle in handles:
                handle.remove()
            names = {id(part): name for name, part in module.named_modules()}
            mine = [(called, args) for called, args in calls.values() if id(called) in names]  # still a part of it
            keep([names[id(called)] for called, _ in mine])
            for called, args in mine:
                run.model(called, args)

    return first


class _Hook:
    """A hook that copies of its module do not have, such as the teacher that a first step makes."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # what a copy, or a pickle, has in its place


def nothing(*args: Any) -> None:
    """Do nothing: stands where a copied module had a hook of ours."""


def _nothing() -> Callable[..., None]:
    return nothing
