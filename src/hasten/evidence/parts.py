"""Takes a batch or an output apart, whatever the script puts it in."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any


def parts(value: Any) -> tuple[list[Any], str]:
    """Return what a batch or an output is made of, and its form.

    Looked into are the collections that torch knows, mappings (Transformers' BatchEncoding), dataclasses, and the
    attributes of other objects (a graph's data), in which only tensors count. Arrays are given as tensors.

    Args:
        value: What a loader or a model gave.
    """
    found: list[Any] = []
    return found, _look(value, found, {id(value)})


def _look(value: Any, found: list[Any], seen: set[int]) -> str:
    """Add the parts of a value to `found`; return its form."""
    import torch
    from torch.utils._pytree import tree_flatten

    leaves, structure = tree_flatten(value)
    forms = []
    for leaf in map(_as_tensor, leaves):
        held = None if isinstance(leaf, torch.Tensor | str | bytes | int | float | None) else _held(leaf)
        if held is None or (leaf is not value and id(leaf) in seen):
            found.append(leaf)
            forms.append(_form(leaf))
        else:
            seen.add(id(leaf))
            forms.append(f"{type(leaf).__name__} {_look(held, found, seen)}")
    return f"{structure} {forms}"


def _held(leaf: Any) -> dict[str, Any] | None:
    """Return the contents of an object that torch does not know as a collection, by name; None: none."""
    import torch

    if isinstance(leaf, Mapping):
        return {str(key): leaf[key] for key in leaf}
    if isinstance(leaf, list | tuple):  # a class of its own
        return {str(place): one for place, one in enumerate(leaf)}
    if isinstance(leaf, type):
        return None
    if dataclasses.is_dataclass(leaf):
        return {field.name: getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)}
    own = {name: _as_tensor(one) for name, one in getattr(leaf, "__dict__", {}).items()}
    return {name: one for name, one in own.items() if isinstance(one, torch.Tensor | Mapping)} or None


def _as_tensor(leaf: Any) -> Any:
    """An array as a tensor; one of texts or objects, and everything else, as it is."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(leaf, numpy.ndarray) or leaf.dtype.kind not in "biufc":
        return leaf
    import torch

    try:
        return torch.from_numpy(numpy.array(leaf, dtype=leaf.dtype.newbyteorder("="), order="C"))
    except TypeError:  # numbers of 80 bits
        return leaf


def _form(leaf: Any) -> str:
    """Return what a part is; how wide its numbers are is for a comparison of bits to say."""
    import torch

    if isinstance(leaf, torch.Tensor):
        kind = "float" if leaf.is_floating_point() else str(leaf.dtype).removeprefix("torch.")
        return f"{kind}{tuple(leaf.shape)}"
    return type(leaf).__name__
