"""Translate a state (nested dicts and lists of tensors and values) to plain JSON and named tensors, and back.

In the JSON, a list is a list. A JSON object has one key, its tag: `{"tuple": [...]}`, `{"tensor": {"at": name}}`.
Nothing is ever looked up by a name from a file, except in the short tables below, so a file cannot run code.
"""

from __future__ import annotations

import argparse
import base64
import io
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hasten.errors import HastenError
from hasten.trainer.checkpoint.tensors import Entries, Restored, as_plain_tensor
from hasten.trainer.checkpoint.values import NOT_SAVED, READ_SMALL, NotSaved, scalar, simple_array, simplified

_DEEPEST = 100  # levels of nesting; JSON readers have a limit too
_LONG = 1024  # bytes; longer ones are stored as an entry among the tensors
_FACTORIES: dict[str, Any] = {
    f.__name__: f for f in (list, int, float, dict, set, str, bool, tuple, Counter, OrderedDict)
}


@dataclass(frozen=True)
class Packed:
    """A state as JSON and named tensors.

    Args:
        structure: The state as JSON values; tensors by name.
        tensors: The tensors by name, on their original devices, in memory shared with the state. Tensors that share
            memory are one entry.
        notes: One sentence for each value that could not be stored, or only as another type.
    """

    structure: Any
    tensors: dict[str, torch.Tensor]
    notes: tuple[str, ...]


def pack(state: dict[Any, Any]) -> Packed:
    """Translate a state to JSON and named tensors; copies its structure, but not its tensors.

    Raises:
        HastenError: The state is not a dict.
    """
    if not isinstance(state, dict):
        raise HastenError(f"A checkpoint is a dict, not a {type_name(state)}.", "Save {'state_dict': ...}.")
    packer = _Packer()
    structure = packer.node(state, ())
    return Packed(structure, packer.entries.close(), tuple(packer.notes))


def unpack(packed: Packed, simple: bool = False) -> Any:
    """Rebuild a state; its tensors share memory with the packed ones.

    Args:
        packed: The result of `pack`.
        simple: Use only types that `torch.load(weights_only=True)` reads: a numpy array becomes a tensor, a path a
            string, a deque a list.
    """
    return _Unpacker(Restored(packed.tensors), simple).value(packed.structure)


def type_name(value: object) -> str:
    """Return the name of a value's class, with its module unless it is a builtin."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def revive_not_saved(value: Any) -> Any:
    """Return a state from a torch file with its stand-ins for `NotSaved` turned back into `NotSaved`."""
    if isinstance(value, dict):
        if len(value) == 1 and NOT_SAVED in value:
            return NotSaved(*value[NOT_SAVED])
        for key, inner in value.items():
            if isinstance(inner, dict | list | tuple):
                value[key] = revive_not_saved(inner)
    elif isinstance(value, list):
        value[:] = [revive_not_saved(inner) for inner in value]
    elif type(value) is tuple:
        return tuple(revive_not_saved(inner) for inner in value)
    return value


class _Packer:
    """Translates one state, collecting its tensors and notes."""

    def __init__(self) -> None:
        self.entries = Entries()
        self.notes: list[str] = []
        self._enclosing: set[int] = set()  # ids of the containers around the current value, to detect cycles

    def node(self, value: Any, path: tuple[str, ...], hashed: bool = False) -> Any:
        """Return the JSON of a value.

        `hashed`: the value is a dict key or in a set. Tensors are refused there: they hash by identity, which a file
        cannot keep.
        """
        plain, is_small = scalar(value)
        if is_small:
            return plain
        if isinstance(value, torch.Tensor) and not hashed:
            return self._tensor(value, path)
        if isinstance(value, np.ndarray | np.generic):
            return self._numpy(value, path) if isinstance(value, np.generic) or not hashed else self._omit(value, path)
        if isinstance(value, bytes | bytearray):
            return self._bytes(value, path)
        if isinstance(value, dict | list | tuple | set | frozenset | deque | argparse.Namespace):
            if id(value) in self._enclosing or len(path) > _DEEPEST:
                return self._omit(value, path, "refers to itself or is nested too deep, and")
            self._enclosing.add(id(value))
            try:
                return self._container(value, path, hashed)
            finally:
                self._enclosing.discard(id(value))
        for base in (str, int, float):
            if isinstance(value, base):  # a StrEnum, an IntEnum, a user's subclass of str
                self._became(value, path, base.__name__)
                return scalar(_exact(base, value))[0]
        return self._omit(value, path)

    def _container(self, value: Any, path: tuple[str, ...], hashed: bool) -> Any:
        """Return the JSON of a dict, list, tuple, set, deque or Namespace."""
        kind = type(value)
        if isinstance(value, dict):
            return self._dict(value, path, hashed)
        if isinstance(value, argparse.Namespace):
            if kind is not argparse.Namespace:
                self._became(value, path, "argparse.Namespace")
            return {"namespace": self._dict(dict(vars(value)), path, hashed)}
        bases = (list, tuple, set, frozenset, deque)
        base = next(base for base in bases if isinstance(value, base))
        if kind is torch.Size:
            return {"size": list(value)}
        if kind is not base:
            self._became(value, path, base.__name__)
        inside = hashed or base in (set, frozenset)
        items = [self.node(item, (*path, str(i)), inside) for i, item in enumerate(value)]
        if base is list:
            return items
        return {"deque": [value.maxlen, items]} if isinstance(value, deque) else {base.__name__: items}

    def _dict(self, value: dict[Any, Any], path: tuple[str, ...], hashed: bool) -> Any:
        """Return the JSON of a dict: an object if all keys are strings, otherwise pairs."""
        pairs = value.items()
        if all(type(key) is str for key in value):
            inside: Any = {key: self.node(item, (*path, key), hashed) for key, item in pairs}
            node = {"dict": inside}
        else:
            inside = [
                [self.node(key, (*path, f"<key {i}>"), True), self.node(item, (*path, _key_name(key)), hashed)]
                for i, (key, item) in enumerate(pairs)
            ]
            node = {"items": inside}
        kind = type(value)
        if isinstance(value, defaultdict):
            factory = getattr(value.default_factory, "__name__", None)
            known = value.default_factory is None or _FACTORIES.get(str(factory)) is value.default_factory
            if not known or kind is not defaultdict:
                self._became(value, path, "defaultdict without its default" if not known else "defaultdict")
            return {"defaultdict": [factory if known else None, node]}
        for base, tag in ((OrderedDict, "ordered"), (Counter, "counter")):
            if isinstance(value, base):
                if kind is not base:
                    self._became(value, path, base.__name__)
                return {tag: node}
        if kind is not dict:
            self._became(value, path, "dict")
        return node

    def _tensor(self, value: torch.Tensor, path: tuple[str, ...]) -> Any:
        """Return the JSON of a tensor, and add the tensor to the entries."""
        plain = as_plain_tensor(value)
        if plain is None:
            return self._omit(value, path)
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            self._became(value, path, "Tensor")
        node = self.entries.add(plain, path)
        if value.requires_grad:
            node["grad"] = True
        return {"parameter" if isinstance(value, torch.nn.Parameter) else "tensor": node}

    def _numpy(self, value: Any, path: tuple[str, ...]) -> Any:
        """Return the JSON of a numpy scalar or array; an array becomes an entry where torch has its dtype."""
        if value.dtype.hasobject or (isinstance(value, np.generic) and value.dtype.kind == "V"):
            return self._omit(value, path)
        if isinstance(value, np.generic):
            return {"scalar": [value.dtype.str, value.tobytes().hex()]}
        if type(value) not in (np.ndarray, np.memmap):
            return self._omit(value, path)
        array: Any = value if value.flags.writeable and min(value.strides, default=0) >= 0 else value.copy()
        try:
            tensor = torch.from_numpy(array)
        except (TypeError, ValueError):  # text, dates, records, foreign byte order
            file = io.BytesIO()
            np.lib.format.write_array(file, np.asarray(value), allow_pickle=False)
            return {"npy": self._bytes(file.getvalue(), path)}
        return {"array": self.entries.add(tensor, path)}

    def _bytes(self, value: bytes | bytearray, path: tuple[str, ...]) -> Any:
        """Return the JSON of bytes; long ones become an entry among the tensors."""
        if type(value) not in (bytes, bytearray):
            self._became(value, path, "bytes" if isinstance(value, bytes) else "bytearray")
        tag = "bytes" if isinstance(value, bytes) else "bytearray"
        if len(value) <= _LONG:
            return {tag: base64.b64encode(value).decode()}
        return {tag: self.entries.add(torch.frombuffer(bytearray(value), dtype=torch.uint8), path)}

    def _became(self, value: object, path: tuple[str, ...], stored_type: str) -> None:
        """Note that a value was stored as another type."""
        self.notes.append(f"{_where(path)}: a {type_name(value)} was stored as a {stored_type}")

    def _omit(self, value: object, path: tuple[str, ...], why: str = "") -> Any:
        """Note that a value cannot be stored, and return the JSON of a `NotSaved`."""
        name = type_name(value)
        self.notes.append(f"{_where(path)}: a {name} {why + ' ' if why else ''}cannot be stored safely")
        return {"not_saved": [name, "..." if why else _short_repr(value)]}


class _Unpacker:
    """Rebuilds values from their JSON."""

    def __init__(self, tensors: Restored, simple: bool) -> None:
        self._tensors = tensors
        self._simple = simple

    def value(self, node: Any, hashed: bool = False) -> Any:
        """Return the value of a JSON node. `hashed`: it is a dict key or in a set, so it must be hashable."""
        if isinstance(node, list):
            return [self.value(item, hashed) for item in node]
        if not isinstance(node, dict):
            return node
        ((tag, inner),) = node.items()
        if tag in READ_SMALL:
            value = READ_SMALL[tag](inner)
            return simplified(value, hashed) if self._simple else value
        match tag:
            case "tensor" | "parameter":
                return self._tensors.tensor(inner, tag == "parameter")
            case "array":
                tensor = self._tensors.tensor(inner)
                return tensor if self._simple else tensor.cpu().numpy()
            case "npy":
                array = np.lib.format.read_array(io.BytesIO(self._bytes(inner["bytes"])), allow_pickle=False)
                return simple_array(array) if self._simple else array
            case "bytes":
                value = self._bytes(inner)
                # torch.load(weights_only=True) refuses `bytes()`, which is how pickle writes empty bytes.
                return value if value or not self._simple else ("" if hashed else bytearray())
            case "bytearray":
                return bytearray(self._bytes(inner))
            case "dict":
                return {key: self.value(item, hashed) for key, item in inner.items()}
            case "items":
                return {self.value(key, True): self.value(item, hashed) for key, item in inner}
            case "ordered":
                return OrderedDict(self.value(inner, hashed))
            case "counter":
                return Counter(self.value(inner, hashed))
            case "defaultdict":
                items = self.value(inner[1], hashed)
                return items if self._simple else defaultdict(inner[0] and _FACTORIES[inner[0]], items)
            case "namespace":
                items = self.value(inner, hashed)
                return items if self._simple else argparse.Namespace(**items)
            case "tuple":
                return tuple(self.value(item, hashed) for item in inner)
            case "set":
                return {self.value(item, True) for item in inner}
            case "frozenset":
                items = (self.value(item, True) for item in inner)
                return tuple(items) if self._simple else frozenset(items)
            case "deque":
                items = [self.value(item, hashed) for item in inner[1]]
                return items if self._simple else deque(items, inner[0])
        raise ValueError(f"unknown tag {tag!r}")

    def _bytes(self, inner: Any) -> bytes:
        """Return bytes, from base64 or from an entry."""
        if isinstance(inner, str):
            return base64.b64decode(inner, validate=True)
        return self._tensors.tensor(inner).cpu().numpy().tobytes()


def _exact(base: type, value: Any) -> Any:
    """Return a value of a subclass as its plain base class."""
    if base is str:
        return str.__str__(value)
    return int.__int__(value) if base is int else float.__float__(value)


def _key_name(key: object) -> str:
    """Return a dict key as text for a value's path."""
    return key if isinstance(key, str) else _short_repr(key)


def _where(path: Iterable[str]) -> str:
    """Return a value's path as text."""
    return ".".join(path) or "the state"


def _short_repr(value: object) -> str:
    """Return a value's repr, at most 200 characters."""
    try:
        text = repr(value)
    except Exception as error:  # a user's __repr__ may raise anything
        text = f"<{type_name(value)}, whose repr raised {type(error).__name__}>"
    return text if len(text) <= 200 else text[:199] + "…"
