"""Collects the objects that a snapshot compares: everything reachable from a dataset and its code.

`ReachableParts` walks breadth first through attributes, containers and code. A function reaches the globals and closure
variables that it names. A method is only entered once reached code contains its name (until then it waits in
`_waiting`), or if Python or a library may call it. Code of trusted libraries is not entered.
"""

from __future__ import annotations

import builtins
import datetime
import decimal
import enum
import functools
import itertools
import logging
import operator
import pathlib
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from hasten.data.code_references import (
    TRUSTED,
    formats,
    globals_of,
    imports_of,
    is_installed,
    is_of_library,
    is_set,
    is_trusted,
    makes_unseeded,
    named_at_run_time,
    names_of,
    stores,
    words,
)
from hasten.data.content_stamp import Stamp

_MOST_NODES, _MOST_BYTES = 200_000, 1 << 29
_MISSING = object()
Node = tuple[str, Any, Callable[[Any], Any], Any]
ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, range, type(Ellipsis), type(NotImplemented)})
_CLOSED = (
    *(enum.Enum, pathlib.PurePath, re.Pattern, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(decimal.Decimal, types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType),
    *(types.MethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType, types.GenericAlias),
    *(types.ClassMethodDescriptorType, types.CodeType, operator.itemgetter, operator.attrgetter, slice),
)  # fmt: skip
_IMMUTABLE = words("torch.dtype torch.device torch.Size torch.layout torch.memory_format")
# Methods that making a sample does not call, unless reached code names their class and so may construct it.
_NOT_CALLED = words(
    "__init__ __new__ __post_init__ __repr__ __str__ __del__ __getstate__ __setstate__ __reduce__ __reduce_ex__ "
    "__init_subclass__ __class_getitem__ __set_name__ __sizeof__ __format__ __dir__"
)
_FOR_TEXT = frozenset({"__repr__", "__str__", "__format__"})
# Methods that libraries call on objects given to them, such as transforms and file-like objects.
_BY_LIBRARIES = words(
    "forward transform get_params loader target_transform transforms read readline readlines readinto seek tell"
)
_OPS = ("aten", "prim", "prims", "torchvision")  # namespaces of `torch.ops` that belong to libraries
_BY_THEIR_NAME = words("secrets builtins")  # modules to recognize even if imported under another name


def same_parts(was: list[Any], now: list[Any]) -> bool:
    """Return whether two lists hold the same objects, or equal plain values (NaN equals NaN)."""
    if len(was) != len(now):
        return False
    if all(map(operator.is_, was, now)):
        return True
    return all(
        old is new or (type(old) is type(new) and type(old) in ATOMS and (old == new or old != old))
        for old, new in zip(was, now, strict=True)
    )


def weight(node: Node) -> tuple[bool, int]:
    """Return a sort key that puts attributes, code and classes before containers, and small nodes before large ones."""
    return isinstance(node[1], list | dict | set | deque), len(node[3])


def _dict_parts(mapping: Any) -> list[Any]:
    return [*mapping, *mapping.values()]


def _instance_parts(instance: Any) -> list[Any]:
    inside = instance.__dict__
    return [type(instance), *inside, *inside.values()]


class ReachableParts:
    """Everything reachable from some objects, breadth first.

    Attributes:
        nodes: Name, object, function that reads its parts, and its parts now.
        stamps: Arrays, tensors, random generators.
        blind: See `Snapshot`.
        names: See `Snapshot`.
        stores: See `Snapshot`.
        alive: Every object reached, by its id; holding them keeps their ids unique while a snapshot lives.
    """

    def __init__(self, roots: dict[str, Any]) -> None:
        self.nodes: list[Node] = []
        self.stamps: list[Stamp] = []
        self.blind = ""
        self.names: set[str] = set(_BY_LIBRARIES)
        self.stores = False
        self.alive: dict[int, Any] = {}
        self._bytes = 0
        self._waiting: dict[str, list[tuple[str, Any]]] = {}  # methods that no reached code has named yet
        self._any_name = False  # whether code computes names for `getattr`, so that any method may be called
        self._modules: list[tuple[str, Any, set[str]]] = []
        self._queue: deque[tuple[str, Any]] = deque(roots.items())
        while self._queue and not self.blind:
            self._meet(*self._queue.popleft())
            if not self._queue:
                self._members_of_modules()
        if len(self.nodes) > _MOST_NODES or self._bytes > _MOST_BYTES:
            self.blind = self.blind or "holds more than can be looked at in each pass"

    # -- one object -----------------------------------------------------------------------------------

    def _meet(self, name: str, value: Any) -> None:
        kind = type(value)
        if kind in ATOMS or id(value) in self.alive:
            return
        self.alive[id(value)] = value
        if len(self.nodes) > _MOST_NODES:
            self.blind = "holds more than can be looked at in each pass"
        elif isinstance(value, type):
            self._class(name, value, constructed=True)
        elif isinstance(value, types.ModuleType):
            self._module(name, value)
        elif isinstance(value, types.FunctionType):
            self._function(name, value)
        elif isinstance(value, types.MethodType):
            self._all(name, [value.__func__, value.__self__])
        elif isinstance(value, property | staticmethod | classmethod | functools.cached_property):
            inner = [getattr(value, part, None) for part in ("fget", "fset", "__func__", "func")]
            self._all(name, [part for part in inner if part is not None])
        elif isinstance(value, functools.partial):
            self._all(name, [value.func, value.args, value.keywords])
        elif isinstance(value, logging.Logger):
            self.names.add("getLogger")
        elif isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            self.names.add(value.__name__)  # `from time import monotonic as clock`
            module = sys.modules.get(str(value.__module__))
            if module is not None and not is_trusted(module):
                self._all(name, [module])
            # Enter the owner of `table.get` or `random.Random(3).random`; pybind11's functions have a PyCapsule.
            if type(value.__self__).__name__ != "PyCapsule":
                self._all(name, [value.__self__])
        elif not self._is_closed(name, value, kind) and not self._stamped(name, value):
            self._instance(name, value, kind)

    def _is_closed(self, name: str, value: Any, kind: type) -> bool:
        if isinstance(value, operator.attrgetter):
            self._reach({part for path in value.__reduce__()[1] for part in path.split(".")})
        if isinstance(value, _CLOSED) and not is_trusted(kind):  # the script's subclass of Enum, Path or tzinfo
            self._attributes(name, value)
            self._class(name, kind, constructed=False)
            return True
        if kind is object or isinstance(value, _CLOSED) or _is_numpy_scalar(value) or _is_known_ufunc(value):
            return True
        if kind.__module__ == "torch._ops" and not str(value).startswith(_OPS):
            self.blind = f"calls an operator that the script may have defined, {value} ({name})"
            return True
        if kind.__module__.startswith("hasten."):  # a technique's wrapper: enter the wrapped object
            self._all("", [getattr(value, "__wrapped__", None)])
            return True
        return f"{kind.__module__}.{kind.__name__}" in _IMMUTABLE

    def _stamped(self, name: str, value: Any) -> bool:
        stamp = Stamp.of(name, value)
        if isinstance(stamp, str):
            self.blind = f"{stamp} ({name})"
            return True
        if stamp is None:
            return False
        self.stamps.append(stamp)
        self._bytes += stamp.size
        self._attributes(name, value)
        if not is_trusted(type(value)):
            self._class(name, type(value), constructed=False)
        return True

    def _attributes(self, name: str, value: Any) -> None:
        """Enter the attributes that a script has set on an array, a tensor, or a member of an Enum."""
        if getattr(value, "__dict__", None):
            self._node(name, value, _instance_parts)

    def _instance(self, name: str, value: Any, kind: type) -> None:
        contained = True
        if isinstance(value, dict):
            self._node(name, value, _dict_parts)
        elif isinstance(value, list | deque | set | tuple | frozenset):
            if not isinstance(value, tuple | frozenset):
                self._node(name, value, list)
            else:
                self._all(name, value)
        elif type(value).__name__ == "ndarray":  # with dtype=object: other arrays have stamps
            self._node(name, value, lambda array: array.ravel().tolist())
        else:
            contained = False
        slots = [slot for base in kind.__mro__ for slot in _slots(base)]
        has_dict = hasattr(value, "__dict__")
        if not contained and _has_hidden_state(kind, len(slots), has_dict):
            self.blind = f"holds {_a(kind)} ({name})"
            return
        if has_dict:
            self._node(name, value, _instance_parts)
        if slots:
            self._node(name, value, lambda instance: [getattr(instance, slot, _MISSING) for slot in slots])
        self._class(name, kind, constructed=False)

    def _node(self, name: str, value: Any, read: Callable[[Any], Any]) -> None:
        parts = read(value)
        self.nodes.append((name, value, read, parts))
        if read is _instance_parts:
            half = (len(parts) - 1) // 2
            for key, part in zip(parts[1 : half + 1], parts[half + 1 :], strict=True):
                if type(part) not in ATOMS:
                    self._queue.append((f"{name}.{key}", part))
        else:
            self._all(name, parts)

    def _all(self, name: str, parts: Iterable[Any]) -> None:
        parts = list(parts)
        kinds = set(map(type, parts))
        if kinds <= ATOMS:
            return
        if kinds == {tuple} and set(map(type, itertools.chain.from_iterable(parts))) <= ATOMS:
            return  # skip plain tuples: (path, label), a million times
        self._queue.extend((name, part) for part in parts if type(part) not in ATOMS)

    # -- code -----------------------------------------------------------------------------------------

    def _function(self, name: str, function: types.FunctionType) -> None:
        self._all(name, [function.__defaults__, function.__kwdefaults__, getattr(function, "__wrapped__", None)])
        if is_trusted(function):
            self.names.add(function.__name__)
            cells = function.__closure__ or ()
            self._all(name, [cell.cell_contents for cell in cells if is_set(cell)])
            if function.__dict__ and not is_of_library(function.__module__ or ""):  # wraps a function of the script
                self._node(name, function, _function_attributes)
            return
        names = names_of(function)
        self._reach(names)
        shown, hidden = named_at_run_time(function)
        self._reach(shown)
        if hidden and not self._any_name:
            self._any_name = True
            self._reach(list(self._waiting))
        self._imports(name, imports_of(function))
        self.stores = self.stores or stores(function)
        if formats(function):
            self._reach(_FOR_TEXT)
        if makes_unseeded(function):
            self.blind = f"draws from a generator without a seed ({function.__name__})"
        if function.__dict__:
            self._node(name, function, _function_attributes)
        cells, module_globals, used = function.__closure__ or (), function.__globals__, globals_of(function)
        names_of_python = vars(builtins)

        def read(part: types.FunctionType) -> list[Any]:  # runs for each sample, hence no slower generator expression
            parts: list[Any] = [part.__code__, part.__defaults__, part.__kwdefaults__, len(part.__dict__)]
            if cells:
                parts += [cell.cell_contents if is_set(cell) else _MISSING for cell in cells]
            for name in used:
                value = module_globals.get(name, _MISSING)
                parts.append(value if value is not _MISSING else names_of_python.get(name, _MISSING))
            return parts

        parts = read(function)
        self.nodes.append((f"{name}: what {function.__name__} reads", function, read, parts))
        named = [*(code_name for code_name in function.__code__.co_freevars), *used]
        self._queue.extend(
            (f"{name}: {label}", part)
            for label, part in zip(named, parts[4:], strict=True)
            if type(part) not in ATOMS and part is not _MISSING
        )

    def _module(self, name: str, module: types.ModuleType) -> None:
        kind = type(module).__name__
        if kind == "_OpNamespace" and module.__name__.rpartition(".")[2] not in _OPS:
            self.blind = f"calls operators that the script may have defined, {module.__name__} ({name})"
        elif not is_trusted(module):
            if is_installed(top := module.__name__.partition(".")[0]):
                self.names.add(top)  # `import polars as pl`: code names `pl`
            self._modules.append((name, module, set()))
        elif kind == "_Ops":
            self.names.add("ops")
        elif module.__name__ in _BY_THEIR_NAME:
            self.names.add(module.__name__)

    def _imports(self, name: str, modules: list[str]) -> None:
        """Enter the modules that code imports as it runs: `from config import LEVEL` inside `__getitem__`."""
        for full in modules:
            module = sys.modules.get(full)
            if module is not None:
                self._all(name, [module])
            elif full.partition(".")[0] not in TRUSTED:
                self.blind = f"imports {full} as it runs ({name})"

    def _class(self, name: str, kind: type, constructed: bool) -> None:
        if not is_trusted(type(kind)):
            self._class(name, type(kind), constructed=False)
        library = any(is_trusted(base) and base.__module__ not in _NEUTRAL for base in kind.__mro__)
        for base in kind.__mro__:
            if is_trusted(base) or (id(base) in self.alive and not constructed):
                continue
            self.alive[id(base)] = base
            self.nodes.append((f"class {base.__name__}", base, _class_parts, _class_parts(base)))
            for key, part in list(vars(base).items()):
                self._member(f"{base.__name__}.{key}", key, part, called=library, constructed=constructed)

    def _member(self, name: str, key: str, part: Any, called: bool, constructed: bool) -> None:
        special = key.startswith("__")
        if not callable(part) and not isinstance(part, property | staticmethod | classmethod):
            if not special and not isinstance(part, types.GetSetDescriptorType):
                self._all(name, [part])
        elif key in _NOT_CALLED and (constructed or key not in _FOR_TEXT):
            if constructed and isinstance(part, types.FunctionType):
                self._queue.append((name, part))
        elif (special and key not in _FOR_TEXT) or called or self._any_name or key in self.names:
            self._queue.append((name, part))
        else:
            self._waiting.setdefault(key, []).append((name, part))

    def _reach(self, names: Iterable[str]) -> None:
        for name in sorted(names):  # a set of strings has another order in each process, and so would fingerprints
            if name not in self.names:
                self.names.add(name)
                self._queue.extend(self._waiting.pop(name, ()))

    def _members_of_modules(self) -> None:
        """Enter the attributes that code may read from the script's own modules: `config.size`."""
        for name, module, known in self._modules:
            inside = vars(module)
            named = (self.names | {"__getattr__"}) & inside.keys()
            if self._any_name:
                named |= {key for key, part in inside.items() if key[:2] != "__" and not callable(part)}
            used = sorted(named - known)
            if not used:
                continue
            known.update(used)

            def read(part: types.ModuleType, used: list[str] = used) -> list[Any]:
                return [vars(part).get(name, _MISSING) for name in used]

            self._node(f"{name}: module {module.__name__}", module, read)


_NEUTRAL = words("builtins typing abc collections torch.utils.data.dataset torch.nn.modules.module")


def _class_parts(kind: type) -> list[Any]:
    inside = vars(kind)
    return [*inside, *inside.values()]


def _function_attributes(function: types.FunctionType) -> list[Any]:
    """Return a function's attributes, without mapping views: `singledispatch`'s registry is reached by its closure."""
    inside = vars(function)
    return [*inside, *(part for part in inside.values() if type(part) is not types.MappingProxyType)]


def _slots(base: type) -> list[str]:
    slots = vars(base).get("__slots__", ())
    slots = [slots] if isinstance(slots, str) else list(slots)
    return [slot for slot in slots if slot not in ("__dict__", "__weakref__")]


def _has_hidden_state(kind: type, slots: int, has_dict: bool) -> bool:
    """Return whether an object is larger than its attributes need, so that C code keeps hidden state in it."""
    room = object.__basicsize__ + 8 * slots + (16 if has_dict else 8)
    return kind.__basicsize__ > room or (not has_dict and not slots and kind.__basicsize__ > object.__basicsize__)


def _is_numpy_scalar(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic | numpy.dtype) and type(value) is not numpy.void


def _is_known_ufunc(value: Any) -> bool:
    """Return whether an object is a ufunc of NumPy or SciPy; `np.frompyfunc` makes ufuncs of any function."""
    if type(value).__name__ != "ufunc":
        return False
    places = (sys.modules.get(name) for name in ("numpy", "scipy.special"))
    return any(getattr(place, value.__name__, None) is value for place in places if place is not None)


def _a(kind: type) -> str:
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
