"""Globals, closures and class attributes that a module's code names: a forward may read and write them."""

from __future__ import annotations

from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import nn


class Place:
    """A name outside of a module's own attributes: in a global namespace, a closure or a class."""

    MARK = "the name "

    def __init__(self, holder: Any, key: str) -> None:
        self._holder, self._key = holder, key
        self.name = f"{self.MARK}{key}"

    def read(self) -> Any:
        """Return what the name stands for; None where it does not exist."""
        if isinstance(self._holder, dict):
            return self._holder.get(self._key)
        if isinstance(self._holder, type):
            return vars(self._holder).get(self._key)
        return self._holder.cell_contents

    def write(self, value: Any) -> None:
        """Let the name stand for something else."""
        if self.read() is value:
            return
        if isinstance(self._holder, dict):
            self._holder[self._key] = value
        elif isinstance(self._holder, type):
            setattr(self._holder, self._key, value)
        else:
            self._holder.cell_contents = value


def outside(module: nn.Module) -> Iterator[Place]:
    """Name what the code of a module's classes, and of those inside, reads outside of itself."""
    classes = {kind for part in module.modules() for kind in type(part).__mro__}
    for kind in classes:
        if kind.__module__.startswith("torch.") or kind is object:
            continue
        for name, value in list(vars(kind).items()):
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, FunctionType):
                yield from _named_by(function)
            elif not name.startswith("__") and not callable(value) and not hasattr(value, "__get__"):
                yield Place(kind, name)


def _named_by(function: FunctionType) -> Iterator[Place]:
    codes = [function.__code__]
    for code in codes:
        codes.extend(one for one in code.co_consts if isinstance(one, type(code)))
    names = {name for code in codes for name in code.co_names}
    for name in sorted(names & function.__globals__.keys()):
        if not isinstance(function.__globals__[name], (type, FunctionType, BuiltinFunctionType, ModuleType)):
            yield Place(function.__globals__, name)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            yield Place(cell, name)
