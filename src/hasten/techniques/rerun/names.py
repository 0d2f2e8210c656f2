"""What a module's code names: globals, closures and class attributes, which a forward may read and write."""

from __future__ import annotations

from collections.abc import Iterator
from logging import Logger
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any

from torch import nn

from hasten.data.reach import WRITES, is_trusted, names_of


class OuterName:
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


_NOTHING_SAID = frozenset({"setattr", "rename", "touch"})  # to be put back, or of tensors
_SAYS = frozenset({"print", "input", "add_scalar", "add_scalars", "add_histogram", "add_image", "log_metric"})
_SAYS_OR_WRITES = (WRITES | _SAYS) - _NOTHING_SAID
_TRACKERS = frozenset({"wandb", "mlflow", "neptune", "comet_ml", "swanlab", "aim"})


class ModuleCode:
    """The code of a module's classes and of those inside, and the script's own functions that it calls.

    Attributes:
        outside: What it names of globals, closures and class attributes.
        reached: All names in what a forward may run.
        says: What a forward may say or write to the outside, which would be said twice; "" for nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        self.outside: list[OuterName] = []
        self.reached: set[str] = set()
        self.says = ""
        self._seen: set[int] = set()
        methods: list[tuple[str, FunctionType]] = []
        for kind in {kind for part in module.modules() for kind in type(part).__mro__}:
            if not kind.__module__.startswith("torch.") and kind is not object:
                methods += self._class(kind)
        self._run([function for name, function in methods if name == "forward"], methods)
        for _, function in methods:  # those that no forward names are not run, but may be called by other means
            self._note(function)

    def _class(self, kind: type) -> Iterator[tuple[str, FunctionType]]:
        for name, value in list(vars(kind).items()):
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, FunctionType):
                yield name, function
            elif not name.startswith("__") and not callable(value) and not hasattr(value, "__get__"):
                self.outside.append(OuterName(kind, name))

    def _run(self, queue: list[FunctionType], methods: list[tuple[str, FunctionType]]) -> None:
        """Go through what a forward may run: functions and methods, by their names."""
        while queue:
            function = queue.pop()
            if id(function) not in self._seen:
                named = self._note(function)
                self.reached |= named
                self.says = self.says or _said(function, named)
                queue += [method for name, method in methods if name in named]

    def _note(self, function: FunctionType) -> frozenset[str]:
        """Note what a function names, and what the script's own functions do that it names."""
        if id(function) in self._seen:
            return frozenset()
        self._seen.add(id(function))
        named = names_of(function)
        for place in _places(function, named):
            value = place.read()
            if isinstance(value, FunctionType):
                if not is_trusted(value):
                    inner = self._note(value)
                    self.says = self.says or _said(value, inner)
                    named |= inner
            elif not isinstance(value, (type, BuiltinFunctionType, ModuleType)):
                self.outside.append(place)
        return named


def _places(function: FunctionType, named: frozenset[str]) -> Iterator[OuterName]:
    for name in sorted(named & function.__globals__.keys()):
        yield OuterName(function.__globals__, name)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__" and is_set(cell):
            yield OuterName(cell, name)


def _said(function: FunctionType, named: frozenset[str]) -> str:
    """What a function of the script's own says or writes; a library's says something when it is used wrongly."""
    if is_trusted(function):
        return ""
    for name in sorted(named):
        value = function.__globals__.get(name)
        if isinstance(value, Logger) or (isinstance(value, ModuleType) and value.__name__ in _TRACKERS):
            return name
    return next(iter(sorted(named & _SAYS_OR_WRITES)), "")


def is_set(cell: CellType) -> bool:
    """Whether a closure's variable has a value yet."""
    try:
        cell.cell_contents  # noqa: B018 - an empty cell says so by raising
    except ValueError:
        return False
    return True
