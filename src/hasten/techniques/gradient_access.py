"""Detect scripts that read or change gradients inside their backward, where a technique may keep different ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from hasten.techniques.replaced import ReplacedFunction, Replacements

Report = Callable[[Any, str], None]

_inside: weakref.WeakKeyDictionary[Any, Report] = weakref.WeakKeyDictionary()
_beside: weakref.WeakKeyDictionary[Any, Report] = weakref.WeakKeyDictionary()
_scaling: weakref.WeakKeyDictionary[Any, Report] = weakref.WeakKeyDictionary()


def watch(technique: Any, report: Report) -> None:
    """Call `report(technique, who)` whenever code other than hasten's asks to see or change gradients in a backward.

    Covers `retain_grad` and hooks on tensors, on graph nodes and thus on modules. Registrations are watched, not the
    backward itself, so the backward costs nothing. Hooks registered earlier are missed, but module hooks register
    their node hooks again in each forward.
    """
    _HOOKS.need(technique)
    _inside[technique] = report


def watch_own_ways(technique: Any, report: Report) -> None:
    """Call `report(technique, how)` whenever a script takes gradients by `torch.autograd.grad`, or scales its loss."""
    _OWN_WAYS.need(technique)
    _beside[technique] = _scaling[technique] = report


def watch_scaling(technique: Any, report: Report) -> None:
    """Call `report(technique, how)` whenever a script scales its loss."""
    _OWN_WAYS.need(technique)
    _scaling[technique] = report


def leave(technique: Any) -> None:
    """Stop calling a technique. Torch's own functions are restored once no technique watches."""
    for watching, functions in ((_inside, _HOOKS), (_beside, _OWN_WAYS), (_scaling, _OWN_WAYS)):
        watching.pop(technique, None)
        functions.leave(technique)


def own_function(node: Any) -> str:
    """Return the name of a graph node's custom `torch.autograd.Function`; "" if the node is torch's own.

    A custom function sees the gradient that flows through it, and need not be linear in it. torch's reentrant
    checkpoint counts as custom, because it runs another backward inside.
    """
    function = getattr(node, "_forward_cls", None)
    if function is None:
        return ""
    home = getattr(function, "__module__", "")
    if home.startswith(("torch.", "hasten.")) and home != "torch.utils.checkpoint":
        return ""
    return str(function.__name__)


def _report(watching: Any, how: str) -> None:
    for technique, report in list(watching.items()):
        report(technique, how)


def _hooks() -> list[ReplacedFunction]:
    import torch

    tensor, function = torch.Tensor, torch.autograd.Function
    return [
        ReplacedFunction(tensor, "register_hook", _reporting("a hook on a tensor")),
        ReplacedFunction(tensor, "register_post_accumulate_grad_hook", _reporting("a hook on a parameter")),
        ReplacedFunction(tensor, "retain_grad", _reporting("retain_grad")),
        # Hooks on graph nodes; a module's full backward hooks register theirs here in each forward too.
        ReplacedFunction(function, "_register_hook", _reporting("a backward hook")),
    ]


def _reporting(how: str) -> Callable[[Any], Any]:
    def change(plain: Any) -> Any:
        def reporting(*args: Any, **kwargs: Any) -> Any:
            hook = args[-1] if args else None
            if not str(getattr(hook, "__module__", "")).startswith("hasten."):
                _report(_inside, how)
            return plain(*args, **kwargs)

        return reporting

    return change


def _own_ways() -> list[ReplacedFunction]:
    import torch

    def telling_grad(plain: Any) -> Any:
        def grad(*args: Any, **kwargs: Any) -> Any:
            _report(_beside, "torch.autograd.grad gives gradients that are not scaled")
            return plain(*args, **kwargs)

        return grad

    def telling_scale(plain: Any) -> Any:
        def scale(self: Any, outputs: Any) -> Any:
            if self.is_enabled():
                _report(_scaling, "the script scales its loss itself (GradScaler)")
            return plain(self, outputs)

        return scale

    return [
        ReplacedFunction(torch.autograd, "grad", telling_grad),
        ReplacedFunction(torch.amp.GradScaler, "scale", telling_scale),
    ]


_HOOKS, _OWN_WAYS = Replacements(_hooks), Replacements(_own_ways)
