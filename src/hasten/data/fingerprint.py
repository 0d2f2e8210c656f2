"""A fingerprint of everything that samples are made of: equal in every process with the same state.

A `Snapshot` detects changes within one process, by object identity. The fingerprint describes the same parts by their
contents: code by its instructions, arrays by their bytes, library classes by name and library version. It is the name
under which samples are cached for other processes and later runs, so whatever cannot be described this way raises
`Unnamed` with the reason.
"""

from __future__ import annotations

import datetime
import decimal
import dis
import enum
import functools
import hashlib
import logging
import operator
import platform
import re
import sys
import types
from pathlib import Path, PurePath
from typing import Any

from hasten.data.code_references import is_set, is_trusted, words
from hasten.data.content_stamp import Stamp
from hasten.data.library_state import library_state, replaced_in_libraries
from hasten.data.snapshot import Snapshot
from hasten.data.snapshot_parts import ATOMS, Node

_VERSION = "hasten samples 1"
_MAIN = {"__mp_main__": "__main__"}  # the script's module name in a spawned worker
# Class attributes that Python sets itself, or that say where the class is defined: samples don't depend on them.
_OF_CLASSES = words(
    "__module__ __doc__ __dict__ __weakref__ __firstlineno__ __static_attributes__ __annotations__ __annotate__ "
    "__parameters__ __orig_bases__ __abstractmethods__ __annotations_cache__ __slots__ __match_args__ _abc_impl"
)
_BY_REPR = (
    *(PurePath, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, types.GenericAlias),
    *(slice, re.Pattern),
)
_DESCRIPTORS = (
    *(types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, types.ClassMethodDescriptorType),
)


class Unnamed(Exception):  # noqa: N818 - not an error: it means that samples cannot be kept for another process
    """Raised for something that has no description valid in another process; the message says what it is."""


def fingerprint(snapshot: Snapshot, roots: dict[str, Any]) -> str:
    """Return a digest of everything a snapshot covers, 40 hexadecimal digits.

    It also covers the environment: versions of Python and libraries, the processor, torch's and Pillow's settings, and
    the working folder, where relative paths begin. If samples may depend on the order of a set of strings, which
    changes with each start of Python, it is only valid in this process and those forked from it.

    Args:
        snapshot: A snapshot of these roots, not blind.
        roots: What samples are made of, by name.

    Raises:
        Unnamed: Something has no description valid in another process.
    """
    if replaced := replaced_in_libraries():
        raise Unnamed(f"the script has put a function of its own in the place of {replaced}")
    if "hash" in snapshot.names:
        raise Unnamed("samples' code names `hash`, which differs from process to process")
    naming = _Naming(snapshot)
    naming.say(_VERSION, platform.python_version(), str(Path.cwd()), library_state())
    if snapshot.names & {"set", "frozenset"}:  # code may iterate over strings in the order of their hashes
        naming.say(hash("its order"))  # differs with each start of Python (PYTHONHASHSEED), like that order
    try:
        for name, root in roots.items():
            naming.say(name)
            naming.visit(root)
        for reached in snapshot.reached():  # modules that code imports as it runs are not reachable from the roots
            naming.visit(reached)
    except RecursionError:
        raise Unnamed("what samples are made of is nested too deeply to be named") from None
    return naming.digest()


class _Naming:
    """Hashes the parts of a snapshot, in an order that does not depend on the process."""

    def __init__(self, snapshot: Snapshot) -> None:
        nodes, stamps = snapshot.parts()
        self._nodes: dict[int, list[Node]] = {}
        for node in nodes:
            self._nodes.setdefault(id(node[1]), []).append(node)
        self._stamps: dict[int, Stamp] = {id(stamp.value): stamp for stamp in stamps}
        self._reached = {id(reached) for reached in snapshot.reached()}
        self._visited: dict[int, tuple[int, Any]] = {}  # keeps each value alive, so that its id stays unique
        self._hash = hashlib.blake2b(digest_size=20)

    def say(self, *words: Any) -> None:
        self._hash.update(repr(words).encode("utf-8", "surrogatepass") + b"\n")

    def digest(self) -> str:
        return self._hash.hexdigest()

    def visit(self, value: Any) -> None:
        """Hash a value's description or, if it was visited before, only its number."""
        kind = type(value)
        if kind in ATOMS or (kind in (list, tuple) and _is_plain(value)) or (kind is dict and _is_plain_dict(value)):
            self.say(kind.__name__, value)
            return
        if id(value) in self._visited:
            self.say("again", self._visited[id(value)][0])
            return
        self._visited[id(value)] = len(self._visited), value
        if kind in (tuple, frozenset, set):
            self._members(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.ModuleType):
            self.say("module", _MAIN.get(value.__name__, value.__name__), compiled(value.__name__))
            self._of_nodes(value)
        elif (stamp := self._stamps.get(id(value))) is not None:
            self.say(kind.__module__, kind.__qualname__)
            self._hash.update(stamp.content_digest())
            self._of_nodes(value)  # attributes that the script set on it
            if not is_trusted(kind):
                self.visit(kind)
        elif not self._callable(value) and not self._closed(value, kind):
            self._instance(value, kind)

    def _members(self, value: Any) -> None:
        self.say(type(value).__name__, len(value))
        if isinstance(value, tuple):
            for part in value:
                self.visit(part)
        elif set(map(type, value)) <= ATOMS:
            self.say(sorted(map(repr, value)))
            if len(value) > 1 and not set(map(type, value)) <= {int, bool}:
                self.say(hash("its order"))
        else:
            raise Unnamed(f"samples are made of a {type(value).__name__} of objects, which has no order")

    def _of_nodes(self, value: Any) -> bool:
        nodes = self._nodes.get(id(value), ())
        for _, thing, read, _ in nodes:
            parts = read(thing)
            self.say(len(parts))
            for part in parts:
                self.visit(part)
        return bool(nodes)

    # -- code -----------------------------------------------------------------------------------------

    def _function(self, function: types.FunctionType) -> None:
        self.say("function", _MAIN.get(function.__module__, function.__module__), function.__qualname__)
        if is_trusted(function):
            self.visit(function.__defaults__)
            self.visit(function.__kwdefaults__)
            for cell in function.__closure__ or ():
                self.visit(cell.cell_contents if is_set(cell) else None)
            self.visit(getattr(function, "__wrapped__", None))
            self._of_nodes(function)
            return
        self._code(function.__code__)
        self._of_nodes(function)  # nothing if no reached code names the function; its instructions suffice then

    def _code(self, code: types.CodeType) -> None:
        self.say(code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags)
        self.say(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_exceptiontable)
        self.say(len(code.co_consts))
        for constant in code.co_consts:
            if type(constant) is frozenset and _only_asked(code, constant):
                self.say("frozenset", sorted(map(repr, constant)))
            else:
                self.visit(constant)

    def _class(self, kind: type) -> None:
        for base in kind.__mro__:
            self.say("class", _MAIN.get(base.__module__, base.__module__), base.__qualname__)
            if is_trusted(base):
                continue
            self.say(compiled(base.__module__))
            if not is_trusted(type(base)):
                self.visit(type(base))
            for name, part in vars(base).items():
                if name in _OF_CLASSES:
                    continue
                self.say(name)
                if self._is_known(part):
                    self.visit(part)
                else:  # no reached code names this attribute: its type suffices
                    self.say("apart", type(part).__qualname__)

    def _is_known(self, part: Any) -> bool:
        code = isinstance(part, types.FunctionType | property | staticmethod | classmethod | functools.cached_property)
        return code or id(part) in self._reached or type(part) in ATOMS or isinstance(part, (tuple, *_DESCRIPTORS))

    def _callable(self, value: Any) -> bool:
        """Hash a bound, wrapped or built-in function; return False if the value is none."""
        if isinstance(value, types.CodeType):
            self._code(value)
        elif isinstance(value, types.MethodType):
            self.say("method")
            self.visit(value.__func__)
            self.visit(value.__self__)
        elif isinstance(value, property | staticmethod | classmethod | functools.cached_property):
            self.say(type(value).__name__)
            for part in ("fget", "fset", "__func__", "func"):
                self.visit(getattr(value, part, None))
        elif isinstance(value, functools.partial):
            self.say("partial")
            for inner in (value.func, value.args, value.keywords):
                self.visit(inner)
        elif isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            owner = value.__self__
            self.say("built in", getattr(value, "__module__", None), value.__qualname__, type(owner).__qualname__)
            self.say(compiled(str(value.__module__)))
            if not isinstance(owner, types.ModuleType | None) and type(owner).__name__ != "PyCapsule":
                self.visit(owner)
        elif isinstance(value, operator.itemgetter | operator.attrgetter):
            self.say(type(value).__name__)
            self.visit(value.__reduce__()[1])
        elif isinstance(value, _DESCRIPTORS):
            self.say("descriptor", value.__objclass__.__qualname__, value.__name__)
        else:
            return False
        return True

    # -- objects --------------------------------------------------------------------------------------

    def _closed(self, value: Any, kind: type) -> bool:
        """Hash an object without parts; return False if it has some."""
        self.say("object", _MAIN.get(kind.__module__, kind.__module__), kind.__qualname__)
        if kind is object or isinstance(value, type(NotImplemented)):
            return True
        if kind.__module__.startswith("hasten."):  # a technique's wrapper: hash the wrapped object
            self.visit(getattr(value, "__wrapped__", None))
        elif isinstance(value, enum.Enum):
            self.say(value._name_)
            self.visit(value._value_)
            if not is_trusted(kind):
                self._of_nodes(value)
                self.visit(kind)
        elif isinstance(value, logging.Logger):
            self.say(value.name)
        elif isinstance(value, _BY_REPR):
            if not is_trusted(kind):
                raise Unnamed(f"samples are made of a {kind.__qualname__}, which cannot be told in another process")
            _refuse_addresses(text := repr(value))
            self.say(text)
        elif isinstance(value, datetime.tzinfo) or kind.__module__.partition(".")[0] in ("torch", "numpy"):
            if id(value) in self._nodes or not is_trusted(kind):
                return False
            _refuse_addresses(text := repr(value))
            self.say(text)
        else:
            return False
        return True

    def _instance(self, value: Any, kind: type) -> None:
        known = self._of_nodes(value)
        if not known and isinstance(value, tuple | frozenset):
            self._members(value)
        elif not known and id(value) not in self._reached:
            raise Unnamed(f"samples are made of a {kind.__qualname__}, which cannot be told in another process")
        self.visit(kind)


def compiled(module: str) -> str:
    """Return a digest of a compiled module's file, if it belongs to no trusted library; "" for other modules.

    Raises:
        Unnamed: The file cannot be read.
    """
    file = getattr(sys.modules.get(module), "__dict__", {}).get("__file__")
    if not isinstance(file, str) or file.endswith((".py", ".pyc")) or is_trusted(sys.modules[module]):
        return ""
    try:
        return hashlib.blake2b(Path(file).read_bytes(), digest_size=20).hexdigest()
    except OSError:
        raise Unnamed(f"the file of the module {module} cannot be read") from None


def _only_asked(code: types.CodeType, constant: frozenset[Any]) -> bool:
    """Return whether code uses a constant set only for `in`, as in `ext in {".jpg", ".png"}`, where order is moot."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    uses = [place for place, step in enumerate(steps) if step.opname == "LOAD_CONST" and step.argval is constant]
    return all(steps[place + 1].opname == "CONTAINS_OP" for place in uses)


def _is_plain(values: Any) -> bool:
    """Return whether a list or tuple holds only plain values and tuples of them, so that its repr describes it."""
    kinds = set(map(type, values))
    if kinds <= ATOMS:
        return True
    if tuple not in kinds or not kinds - {tuple} <= ATOMS:
        return False
    return all(set(map(type, value)) <= ATOMS for value in values if type(value) is tuple)


def _is_plain_dict(values: dict[Any, Any]) -> bool:
    return _is_plain(list(values)) and _is_plain(list(values.values()))


def _refuse_addresses(text: str) -> None:
    if " at 0x" in text:  # an object's default repr: the address differs between processes
        raise Unnamed(f"samples are made of {text[:80]}, which cannot be told in another process")
