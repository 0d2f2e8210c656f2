"""Keep torch's optimizers from importing torch._dynamo, which takes seconds, in a training that compiles nothing.

`Optimizer.step` imports it to insert a graph break; `zero_grad` and `add_param_group` import it to exclude themselves
from compilation. Neither has an effect if nothing is compiled, and nothing is compiled before somebody (torch.compile,
for example) imports torch._dynamo. Until then these methods bypass torch._dynamo; from then on they are torch's own.

A script may rely on a side effect of that import: it makes `torch.distributed.fsdp` available after a mere
`import torch`. Once an optimizer has bypassed torch._dynamo, a missing attribute of such a package imports it.
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
_CACHE_ATTRIBUTE = "__dynamo_disable"  # attribute in which torch caches a function's version that is never compiled
# The names that torch's wrapper of `step` uses. A torch whose wrapper uses others is left alone: it may do more.
_EXPECTED_NAMES = {
    "cast", "Optimizer", "torch", _DYNAMO, "_dynamo", "is_grad_enabled", "set_grad_enabled", "defaults", "graph_break",
}  # fmt: skip
# Packages that `import torch` imports, and that get further submodules when torch._dynamo is imported.
_GROWING = (
    "torch.distributed", "torch.distributed.algorithms", "torch.fx.experimental", "torch.fx.passes", "torch.nn.utils",
    "torch.utils",
)  # fmt: skip


def optimizers_without_dynamo() -> None:
    """Make optimizers bypass torch._dynamo until it is imported; does nothing if torch is imported already."""
    if "torch" not in sys.modules:
        after_import("torch.optim.optimizer", _bypass_dynamo)


def _bypass_dynamo() -> None:
    """Replace the functions that import torch._dynamo.

    Runs after torch.optim.optimizer was executed and before the optimizers' modules, which decorate `step` with it.
    """
    module: Any = sys.modules["torch.optim.optimizer"]
    plain = getattr(module, "_use_grad_for_differentiable", None)
    if isinstance(plain, FunctionType) and _is_known(plain):
        module._use_grad_for_differentiable = functools.wraps(plain)(functools.partial(_stepping, plain))
    methods = list(_disabled(vars(getattr(module, "Optimizer", object)).values()))
    # torch calls what it finds in the cache attribute, and imports torch._dynamo only if there is nothing.
    cached = [(function, _first_call(function)) for function in methods]
    for function, first in cached:
        setattr(function, _CACHE_ATTRIBUTE, first)
    after_import(_DYNAMO, functools.partial(_clear_caches, cached))


def _clear_caches(cached: Iterable[tuple[Any, Any]]) -> None:
    """Remove our entries from the cache attributes once torch._dynamo is imported, so that torch fills them itself."""
    for function, first in cached:
        if getattr(function, _CACHE_ATTRIBUTE, None) in (function, first):
            delattr(function, _CACHE_ATTRIBUTE)


def _first_call(function: Any) -> Any:
    """Return a function that, at its first call, makes torch's packages answer for torch._dynamo's import.

    Later calls go directly to the plain function.
    """

    def first(*args: Any, **kwargs: Any) -> Any:
        setattr(function, _CACHE_ATTRIBUTE, function)
        _answer_for_modules()
        return function(*args, **kwargs)

    return first


@functools.cache
def _answer_for_modules() -> None:
    """Give torch's packages a `__getattr__` that imports torch._dynamo, as plain torch would have done by now."""
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
    """Return whether a frame belongs to neither torch nor the import system, which looks up names before importing.

    Those two work without torch._dynamo in a process that has no optimizer, so they do not need it here. Importing
    torch._dynamo in the middle of one of their imports would be a circular import.
    """
    name = str(frame.f_globals.get("__name__"))
    return name != "torch" and not name.startswith(("torch.", "importlib."))


def _is_known(plain: Callable[[Any], Any]) -> bool:
    """Return whether torch's decorator of `step` does only what `_stepping` replaces."""
    inner = next((code for code in plain.__code__.co_consts if isinstance(code, CodeType)), None)
    return inner is not None and "graph_break" in inner.co_names and set(inner.co_names) <= _EXPECTED_NAMES


def _stepping(plain: Callable[[Any], Any], step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an optimizer's `step` as torch's decorator does, but without a graph break until dynamo is imported."""
    import torch

    by_torch = plain(step)

    @functools.wraps(step)
    def _use_grad(*args: Any, **kwargs: Any) -> Any:
        if _DYNAMO in sys.modules:
            return by_torch(*args, **kwargs)
        was_enabled = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(args[0].defaults["differentiable"])
            return step(*args, **kwargs)
        finally:
            torch.set_grad_enabled(was_enabled)

    return _use_grad


def _disabled(methods: Iterable[Any]) -> Iterator[Any]:
    """Yield the plain functions of those methods that torch decorates with `_disable_dynamo`."""
    for method in methods:
        if isinstance(method, FunctionType) and _CACHE_ATTRIBUTE in method.__code__.co_consts:
            yield method.__wrapped__  # type: ignore[attr-defined]
