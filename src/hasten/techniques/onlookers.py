"""Notice a script that looks into its own backward: a technique may have gradients in another state there."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

Told = Callable[[Any, str], None]

_inside: weakref.WeakKeyDictionary[Any, Told] = weakref.WeakKeyDictionary()
_beside: weakref.WeakKeyDictionary[Any, Told] = weakref.WeakKeyDictionary()


def watch(technique: Any, told: Told) -> None:
    """Call `told(technique, who)` whenever code other than hasten's asks to see or change gradients inside a backward.

    That is: hooks on tensors, on nodes of the graph and so on modules, and `retain_grad`. Nothing is watched in the
    backward itself, so it costs nothing there. Hooks that were registered earlier are not told of, but those of
    modules are registered again in each forward.
    """
    if not _inside:
        _tap_hooks()
    _inside[technique] = told


def watch_own_ways(technique: Any, told: Told) -> None:
    """Call `told(technique, how)` whenever a script takes gradients by `torch.autograd.grad`, or scales its loss."""
    if not _beside:
        _tap_own_ways()
    _beside[technique] = told


def own_function(node: Any) -> str:
    """Return the name of a graph node's `torch.autograd.Function` that is not torch's, or runs another backward; "".

    Such a function sees the gradient that flows through it, and need not be linear in it.
    """
    function = getattr(node, "_forward_cls", None)
    if function is None:
        return ""
    home = getattr(function, "__module__", "")
    if home.startswith(("torch.", "hasten.")) and home != "torch.utils.checkpoint":
        return ""
    return str(function.__name__)


def _tell(watching: Any, what: str) -> None:
    for technique, told in list(watching.items()):
        told(technique, what)


def _tap_hooks() -> None:
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
            _tell(_inside, what)
        return plain(*args, **kwargs)

    return told


def _tap_own_ways() -> None:
    import torch

    plain_grad, plain_scale = torch.autograd.grad, torch.amp.GradScaler.scale

    @functools.wraps(plain_grad)
    def grad(*args: Any, **kwargs: Any) -> Any:
        _tell(_beside, "torch.autograd.grad gives gradients that are not scaled")
        return plain_grad(*args, **kwargs)

    @functools.wraps(plain_scale)
    def scale(self: Any, outputs: Any) -> Any:
        if self.is_enabled():
            _tell(_beside, "the script scales its loss itself (GradScaler)")
        return plain_scale(self, outputs)

    torch.autograd.grad = grad
    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]
