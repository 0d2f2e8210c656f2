"""Find the globals, closures and class attributes that a module's code names: a forward may read and write them.

`ModuleCode` starts at the methods of a module's classes and follows names, through the script's own functions, classes
and files, but not into libraries. It reads names in byte code rather than running anything, so it finds too much rather
than too little; what is reached by other routes (`getattr` with a computed name) is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from logging import Logger
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import nn

from hasten.data.code_references import WRITES, is_set, is_trusted, names_of, stores, words
from hasten.evidence.libraries import is_library


class OuterName:
    """A name outside of a module's own attributes: in a global namespace, a closure or a class.

    Args:
        holder: The namespace: a dict, a class, or the cell of a closure.
        key: The name.
    """

    MARK = "the name "

    def __init__(self, holder: Any, key: str) -> None:
        self._holder, self._key = holder, key
        self.name = f"{self.MARK}{key}"

    def read(self) -> Any:
        """Return the name's value; None if the name does not exist."""
        if isinstance(self._holder, dict):
            return self._holder.get(self._key)
        if isinstance(self._holder, type):
            return vars(self._holder).get(self._key)
        return self._holder.cell_contents

    def write(self, value: Any) -> None:
        """Bind the name to a value."""
        if self.read() is value:
            return
        if isinstance(self._holder, dict):
            self._holder[self._key] = value
        elif isinstance(self._holder, type):
            setattr(self._holder, self._key, value)
        else:
            self._holder.cell_contents = value


_NOTHING_SAID = frozenset({"setattr", "rename", "touch"})  # undone by restoring, or names that tensors use too
_SAYS = frozenset({"print", "input", "add_scalar", "add_scalars", "add_histogram", "add_image", "log_metric"})
# Methods of lists, dicts, sets, queues and context variables that modify the object.
_CHANGES = words(
    "append appendleft extend insert pop popleft popitem remove clear update setdefault add discard sort reverse"
    " put get put_nowait get_nowait set"
)
_SAYS_OR_WRITES = (WRITES | _SAYS) - _NOTHING_SAID
_TRACKERS = frozenset({"wandb", "mlflow", "neptune", "comet_ml", "swanlab", "aim"})


_PLAIN = (type(None), str, bytes, int, float, complex, type, FunctionType, BuiltinFunctionType)


class ModuleCode:
    """The code of the classes of a module and its submodules, and of the script's own functions that it calls.

    Attributes:
        outside: The globals, closure variables and class attributes that the code names.
        reached: All names in code that a forward may run.
        changes: Whether that code may modify containers or objects, rather than only read them.
        says: Name of a function by which a forward may print, log or write, which would happen twice; "" for none.
    """

    def __init__(self, module: nn.Module) -> None:
        self.outside: list[OuterName] = []
        self.reached: set[str] = set()
        self.changes = False
        self.says = ""
        self._functions_read: set[int] = set()  # ids of functions that were read
        self._held: set[tuple[int, str]] = set()  # holders (by id) and names that were found in `_inside`
        self._functions: list[FunctionType] = []
        methods: list[tuple[str, FunctionType]] = []
        modules = list(module.modules())
        classes = {class_ for submodule in modules for class_ in type(submodule).__mro__}
        classes |= {
            type(value) for submodule in modules for value in vars(submodule).values() if _is_scripts(type(value))
        }
        for class_ in classes:
            if not class_.__module__.startswith("torch.") and class_ is not object:
                methods += self._class(class_)
        self._run([function for name, function in methods if name == "forward"], methods)
        self.changes = bool(self.reached & _CHANGES) or any(
            stores(function, elements=True) for function in self._functions
        )
        for _, function in methods:  # methods that no forward names may still be called by other means
            self._note(function)

    def _class(self, kind: type) -> Iterator[tuple[str, FunctionType]]:
        """Yield a class's methods, by name, and note its other attributes."""
        for name, value in list(vars(kind).items()):
            function = _function_of(value)
            if isinstance(function, FunctionType):
                yield name, function
            elif not name.startswith("__") and not callable(value) and not hasattr(value, "__get__"):
                self.outside.append(OuterName(kind, name))

    def _run(self, queue: list[FunctionType], methods: list[tuple[str, FunctionType]]) -> None:
        """Follow functions and methods that a forward may run, by name, and note what they reach and say."""
        while queue:
            function = queue.pop()
            if id(function) not in self._functions_read:
                named = self._note(function)
                self.reached |= named
                self.says = self.says or _printing_name(function, named)
                queue += [method for name, method in methods if name in named]

    def _note(self, function: FunctionType) -> frozenset[str]:
        """Note the outer names in a function, and in the script's own functions that it names. Return all names."""
        if id(function) in self._functions_read:
            return frozenset()
        self._functions_read.add(id(function))
        self._functions.append(function)
        named = names_of(function)
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        # A default argument can change too (`def forward(self, x, seen=[])`), but has no name to rebind.
        self.outside += [
            OuterName({"a default": default}, "a default") for default in defaults if not isinstance(default, _PLAIN)
        ]
        holders: list[Any] = []
        places = list(_outer_names(function, named))
        for place in places:  # the list grows while it is iterated
            value = _function_of(place.read())
            if isinstance(value, FunctionType):
                if not is_trusted(value):
                    self.outside += [OuterName(vars(value), key) for key in vars(value) if key != "__wrapped__"]
                    inner = self._note(value)
                    self.says = self.says or _printing_name(value, inner)
                    named |= inner
            elif isinstance(value, type | ModuleType):
                holders += [value] * _is_scripts(value)
            elif not isinstance(value, BuiltinFunctionType):
                self.outside.append(place)
                holders += [type(value)] * _is_scripts(type(value))
            places += self._inside(holders, named)
        return named

    def _inside(self, holders: list[Any], named: frozenset[str]) -> Iterator[OuterName]:
        """Yield the places under these names in the script's other classes and files, each once."""
        for holder in holders:
            for key in sorted(named & vars(holder).keys()):
                if (id(holder), key) not in self._held:
                    self._held.add((id(holder), key))
                    yield OuterName(vars(holder) if isinstance(holder, ModuleType) else holder, key)


def _outer_names(function: FunctionType, named: frozenset[str]) -> Iterator[OuterName]:
    """Yield the globals and closure variables that a function names."""
    for name in sorted(named & function.__globals__.keys()):
        yield OuterName(function.__globals__, name)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__" and is_set(cell):
            yield OuterName(cell, name)


def _function_of(value: Any) -> Any:
    """Return the function inside a class method, static method or property; other values unchanged."""
    if isinstance(value, classmethod | staticmethod):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _is_scripts(holder: Any) -> bool:
    """Return whether a class or module comes from the script's own files, rather than from an installed library."""
    module = holder if isinstance(holder, ModuleType) else sys.modules.get(holder.__module__)
    file = getattr(module, "__file__", None)
    return not is_trusted(holder) and not (isinstance(file, str) and is_library(file))


def _printing_name(function: FunctionType, named: frozenset[str]) -> str:
    """Return the name by which a script's function prints, logs or writes; "" for none.

    Library functions do not count: they say something when they are used wrongly.
    """
    if is_trusted(function):
        return ""
    for name in sorted(named):
        value = function.__globals__.get(name)
        if isinstance(value, Logger) or (isinstance(value, ModuleType) and value.__name__ in _TRACKERS):
            return name
    return next(iter(sorted(named & _SAYS_OR_WRITES)), "")
