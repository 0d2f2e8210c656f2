"""Keeps torch's optimizers from importing torch._dynamo in a training that compiles nothing.

`Optimizer.step` imports it to break a graph around itself, `zero_grad` and `add_param_group` to have themselves not
compiled. Both do nothing where nothing is compiled, and nothing is before somebody imports torch._dynamo, as
torch.compile does. Until then these calls go past it, which saves its import; from then on they are torch's own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from hasten.taps.after_import import after_import

_DYNAMO = "torch._dynamo"
_KEPT_AS = "__dynamo_disable"  # where torch keeps a function as it is called beside compiled code
# What torch's `step` does beside calling the optimizer's own: where a version does more, it is left alone.
_KNOWN = {
    "cast", "Optimizer", "torch", _DYNAMO, "_dynamo", "is_grad_enabled", "set_grad_enabled", "defaults", "graph_break",
}  # fmt: skip


def optimizers_without_dynamo() -> None:
    """Have optimizers go past torch._dynamo until it is there; called before torch is imported."""
    if "torch" not in sys.modules:
        after_import("torch.optim.optimizer", _go_past)


def _go_past() -> None:
    """torch.optim.optimizer was executed, and what defines optimizers by it was not yet."""
    module: Any = sys.modules["torch.optim.optimizer"]
    plain = getattr(module, "_use_grad_for_differentiable", None)
    if isinstance(plain, FunctionType) and _is_known(plain):
        module._use_grad_for_differentiable = functools.wraps(plain)(functools.partial(_stepping, plain))
    past = list(_disabled(vars(getattr(module, "Optimizer", object)).values()))
    for function in past:
        setattr(function, _KEPT_AS, function)
    after_import(_DYNAMO, functools.partial(_ask_dynamo, past))


def _ask_dynamo(past: Iterable[Any]) -> None:
    """torch._dynamo is there: have torch ask it, as it does where nothing is kept."""
    for function in past:
        if getattr(function, _KEPT_AS, None) is function:
            delattr(function, _KEPT_AS)


def _is_known(plain: Callable[[Any], Any]) -> bool:
    inner = next((code for code in plain.__code__.co_consts if isinstance(code, CodeType)), None)
    return inner is not None and "graph_break" in inner.co_names and set(inner.co_names) <= _KNOWN


def _stepping(plain: Callable[[Any], Any], step: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer's `step` as torch's decorator makes it, but past torch._dynamo before that is there."""
    import torch

    through = plain(step)

    @functools.wraps(step)
    def _use_grad(*args: Any, **kwargs: Any) -> Any:
        if _DYNAMO in sys.modules:
            return through(*args, **kwargs)
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(args[0].defaults["differentiable"])
            return step(*args, **kwargs)
        finally:
            torch.set_grad_enabled(before)

    return _use_grad


def _disabled(methods: Iterable[Any]) -> Iterator[Any]:
    """Of these methods, those that torch never has compiled, as they stand in its source."""
    for method in methods:
        if isinstance(method, FunctionType) and _KEPT_AS in method.__code__.co_consts:
            yield method.__wrapped__  # type: ignore[attr-defined]
