"""Find code in a model whose effects torch.compile does not reproduce, by reading attributes and byte code."""

from __future__ import annotations

import collections
import dis
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType

from torch import nn

from hasten.data.code_references import codes_of
from hasten.evidence.libraries import is_library
from hasten.techniques.recompute.names import ModuleCode

_CATCHES = frozenset({"CHECK_EXC_MATCH", "CHECK_EG_MATCH"})  # byte code of `except SomeError`, and of `except*`
_ASKS = ("is_compiling", "is_dynamo_compiling")


def why_not_followed(model: nn.Module) -> str:
    """Return why compiled code would not do what this model's forward does; "" if no reason is known.

    Dynamo reads the state of a `random.Random` once, when it compiles. (Numbers of Python's global generator, NumPy's
    and torch's are drawn correctly.) It leaves a full `deque` as it was when it compiled. Errors of operators are
    raised when compiled code runs, outside of the `try` around the operators.
    """
    named = model.named_modules()
    held = [(f"{path}.{name}".strip("."), value) for path, part in named for name, value in vars(part).items()]
    held += [(place.name, place.read()) for place in ModuleCode(model).outside]
    for name, value in held:
        # Look one level into containers and plain objects (`sampler.rng`), no deeper.
        items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        plain = not isinstance(value, type | ModuleType) and hasattr(value, "__dict__") and not name.startswith("_")
        contents = [*items, *(vars(value).values() if plain else ())]
        if any(isinstance(part, random.Random) for part in (value, *contents)):
            return f"{name} is a random.Random, of which compiled code would draw the same numbers each time"
        if any(isinstance(part, collections.deque) and part.maxlen is not None for part in (value, *contents)):
            return f"{name} is a deque with a maxlen, whose changes compiled code does not follow"
    for function in own_functions(model):
        for code in codes_of(function.__code__):
            where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
            if asks := next((name for name in _ASKS if name in code.co_names), ""):
                return f"its forward does something else where it is compiled ({asks}, {where})"
            if any(instruction.opname in _CATCHES for instruction in dis.get_instructions(code)):
                return f"its forward catches errors ({where}), which compiled code raises elsewhere"
    return ""


def own_functions(model: nn.Module) -> Iterator[FunctionType]:
    """Yield the functions of the script, not of libraries, that a forward may run.

    Starts at methods named `forward`, and follows every name in their code that is also the name of a method of the
    model's modules, or of a global function. That may yield too many functions, but misses only calls by other routes
    (`getattr`, a function kept in an attribute).
    """
    kinds = {kind for part in model.modules() for kind in type(part).__mro__ if kind is not object}
    methods = [
        (name, function)
        for kind in kinds
        for name, value in vars(kind).items()
        if isinstance(function := _function_of(value), FunctionType) and _is_own(function)
    ]
    queue, seen = [function for name, function in methods if name == "forward"], set()
    while queue:
        function = queue.pop()
        if function in seen:
            continue
        seen.add(function)
        yield function
        names = {name for code in codes_of(function.__code__) for name in code.co_names}
        queue += [method for name, method in methods if name in names]
        called = (function.__globals__.get(name) for name in names)
        queue += [value for value in called if isinstance(value, FunctionType) and _is_own(value)]


def _function_of(value: object) -> object:
    """Return the function behind what stands in a class; of other objects nothing is asked, which may raise."""
    if isinstance(value, staticmethod | classmethod | MethodType):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _is_own(function: FunctionType) -> bool:
    file, home = function.__code__.co_filename, function.__module__ or ""  # None: made by `exec`
    return not (is_library(file) or is_library(os.path.realpath(file)) or home.startswith("hasten."))


def methods_in(code: CodeType) -> set[str]:
    """Return the names of methods that a function's code calls."""
    return {
        instruction.argval
        for instruction in dis.get_instructions(code)
        # Since Python 3.12, a method call is a LOAD_ATTR with a flag, which dis shows as "NULL|self".
        if instruction.opname == "LOAD_METHOD"
        or (instruction.opname == "LOAD_ATTR" and "NULL|self" in instruction.argrepr)
    }
