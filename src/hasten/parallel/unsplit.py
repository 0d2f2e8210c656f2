"""A model whose layers are split over ranks, computing as it did before: to compare both on one batch."""

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
    """Return which forward hooks each part has."""
    return {part: {kind: set(vars(part)[kind]) for kind in _KINDS} for part in module.modules()}


def remember(module: nn.Module, before: Hooks) -> None:
    """Keep with a module which hooks came by its being split.

    Args:
        module: Split.
        before: From `hooks_of`, before that.
    """
    vars(module)[_HOOKS] = {
        part: {kind: kept[kind] - before[part][kind] for kind in _KINDS} for part, kept in hooks_of(module).items()
    }


@contextlib.contextmanager
def unsplit(module: nn.Module) -> Iterator[None]:
    """Let a split module compute by itself, with whole weights; a collective at its beginning.

    Each rank needs room for the whole model. No gradients: its parameters are other tensors meanwhile.
    """
    added: Hooks = vars(module).get(_HOOKS, {})
    kept: list[tuple[dict[str, Any], str, Any]] = []
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if is_sharded(parameter):
                kept.append((part._parameters, name, parameter))
    try:
        for owner, name, parameter in kept:
            owner[name] = nn.Parameter(parameter.detach().full_tensor(), requires_grad=False)
        for part, ours in added.items():
            for kind in _KINDS:
                if ours[kind]:
                    hooks = vars(part)[kind]
                    kept.append((vars(part), kind, hooks))
                    vars(part)[kind] = OrderedDict((at, hook) for at, hook in hooks.items() if at not in ours[kind])
        yield
    finally:
        for owner, name, value in kept:
            owner[name] = value
