"""Keeps torch's optimizers from importing torch._dynamo in a training that compiles nothing.

`Optimizer.step` imports it to break a graph around itself, `zero_grad` and `add_param_group` to have themselves not
compiled. Both do nothing where nothing is compiled, and nothing is before somebody imports torch._dynamo, as
torch.compile does. Until then these calls go past it, which saves its import; from then on they are torch's own.
A script may rely on what that import leaves behind (`torch.distributed.fsdp` beside a mere `import torch`): where it
asks for such a module, after the first call that went past, torch._dynamo is imported then.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from hasten.taps.after_import import after_import

_DYNAMO = "torch._dynamo"
_KEPT_AS = "__dynamo_disable"  # where torch keeps a function as it is called beside compiled code
# What torch's `step` does beside calling the optimizer's own: where a version does more, it is left alone.
_KNOWN = {
    "cast", "Optimizer", "torch", _DYNAMO, "_dynamo", "is_grad_enabled", "set_grad_enabled", "defaults", "graph_break",
}  # fmt: skip
# Packages that `import torch` brings, and in which torch._dynamo's import leaves modules that it does not.
_GROWING = (
    "torch.distributed", "torch.distributed.algorithms", "torch.fx.experimental", "torch.fx.passes", "torch.nn.utils",
    "torch.utils",
)  # fmt: skip


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
    kept = [(function, _first_call(function)) for function in past]
    for function, first in kept:
        setattr(function, _KEPT_AS, first)
    after_import(_DYNAMO, functools.partial(_ask_dynamo, kept))


def _ask_dynamo(kept: Iterable[tuple[Any, Any]]) -> None:
    """torch._dynamo is there: have torch ask it, as it does where nothing is kept."""
    for function, first in kept:
        if getattr(function, _KEPT_AS, None) in (function, first):
            delattr(function, _KEPT_AS)


def _first_call(function: Any) -> Any:
    """Return what torch calls in a function's place: the function, once torch's modules know that one went past."""

    def first(*args: Any, **kwargs: Any) -> Any:
        setattr(function, _KEPT_AS, function)
        _answer_for_modules()
        return function(*args, **kwargs)

    return first


@functools.cache
def _answer_for_modules() -> None:
    """Have packages of torch import torch._dynamo, which plain torch would have by now, where a module is missing."""
    for name in _GROWING:
        if (package := sys.modules.get(name)) is not None:
            vars(package)["__getattr__"] = _answering(package, vars(package).get("__getattr__"))


def _answering(package: ModuleType, plain: Callable[[str], Any] | None) -> Callable[[str], Any]:
    def __getattr__(name: str) -> Any:
        if _DYNAMO not in sys.modules and not name.startswith("__") and _is_a_scripts(sys._getframe(1)):
            importlib.import_module(_DYNAMO)
            if name in vars(package):
                return vars(package)[name]
        if plain is not None:
            return plain(name)
        raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}", name=name, obj=package)

    return __getattr__


def _is_a_scripts(frame: FrameType) -> bool:
    """Whether neither torch's own code asks, nor the import system, which looks for a name before it imports it.

    Both do without torch._dynamo in a process that has no optimizer; amid an import of theirs, its own would go
    round in a circle.
    """
    asks = str(frame.f_globals.get("__name__"))
    return asks != "torch" and not asks.startswith(("torch.", "importlib."))


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
