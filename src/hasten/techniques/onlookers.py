"""Notice a script that looks into its own backward: a technique may have gradients in another state there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Told = Callable[[str], None]

_told: list[Told] = []


def watch(told: Told) -> None:
    """Call `told(what)` whenever code other than hasten's asks to see or change gradients inside a backward.

    That is: hooks on tensors, on nodes of the graph and so on modules, and `retain_grad`. Nothing is watched in the
    backward itself, so it costs nothing there. Hooks that were registered earlier are not told of, but those of
    modules are registered again in each forward.
    """
    if not _told:
        _tap()
    _told.append(told)


def own_function(node: Any) -> str:
    """Return the name of a graph node's `torch.autograd.Function` that is not torch's, or runs another backward; "".

    Such a function sees the gradient that flows through it, and need not be linear in it.
    """
    function = getattr(node, "_forward_cls", None)
    if function is None:
        return ""
    home = getattr(function, "__module__", "")
    if home.startswith("torch.") and home != "torch.utils.checkpoint":
        return ""
    return str(function.__name__)


def _tap() -> None:
    import torch

    for name, what in (
        ("register_hook", "a hook on a tensor"),
        ("register_post_accumulate_grad_hook", "a hook on a parameter"),
        ("retain_grad", "retain_grad"),
    ):
        setattr(torch.Tensor, name, _telling(getattr(torch.Tensor, name), what))
    # Nodes' hooks pass here, those that a module's full backward hooks set in each forward too.
    register = _telling(torch.autograd.Function._register_hook, "a backward hook")
    torch.autograd.Function._register_hook = staticmethod(register)  # type: ignore[method-assign]


def _telling(plain: Any, what: str) -> Any:
    @functools.wraps(plain)
    def told(*args: Any, **kwargs: Any) -> Any:
        hook = args[-1] if args else None
        if not str(getattr(hook, "__module__", "")).startswith("hasten."):
            for one in _told:
                one(what)
        return plain(*args, **kwargs)

    return told
