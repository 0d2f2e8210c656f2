"""Run a model whose layers are split over ranks as if it were not split, to compare both on one batch."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import nn

from hasten.parallel.sharded import is_sharded

_HOOKS = "_hasten_tensor_hooks"
_KINDS = ("_forward_pre_hooks", "_forward_hooks")

Hooks = dict[nn.Module, dict[str, set[int]]]


def hooks_of(module: nn.Module) -> Hooks:
    """Return the ids of each submodule's forward hooks and forward pre-hooks."""
    return {part: {kind: set(vars(part)[kind]) for kind in _KINDS} for part in module.modules()}


def remember(module: nn.Module, before: Hooks) -> None:
    """Record on a module which hooks the split added.

    Args:
        module: The split module.
        before: Result of `hooks_of` before the split.
    """
    vars(module)[_HOOKS] = {
        part: {kind: after[kind] - before[part][kind] for kind in _KINDS} for part, after in hooks_of(module).items()
    }


@contextlib.contextmanager
def unsplit(module: nn.Module) -> Iterator[None]:
    """Return a context in which a split module has whole weights and no split hooks; entering it is a collective.

    Each rank needs memory for the whole model. Nothing can be trained in it: its parameters are replaced by others.
    """
    added: Hooks = vars(module).get(_HOOKS, {})
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if is_sharded(parameter):
                replaced.append((part._parameters, name, parameter))
    try:
        for owner, name, parameter in replaced:
            owner[name] = nn.Parameter(parameter.detach().full_tensor(), requires_grad=False)
        for part, ids in added.items():
            for kind in _KINDS:
                if ids[kind]:
                    hooks = vars(part)[kind]
                    replaced.append((vars(part), kind, hooks))
                    vars(part)[kind] = OrderedDict((at, hook) for at, hook in hooks.items() if at not in ids[kind])
        yield
    finally:
        for owner, name, value in replaced:
            owner[name] = value
