"""Take a batch or a model's output apart into tensors and other leaves, whatever container the script uses."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any


def parts(value: Any) -> tuple[list[Any], str]:
    """Return the leaves of a batch or an output, and a text that describes its structure.

    It looks into the collections that torch knows, mappings (Transformers' BatchEncoding), dataclasses, and the
    attributes of other objects (a graph's data), of which only tensors and mappings count. Arrays are returned as
    tensors.

    Args:
        value: A loader's batch or a model's output.
    """
    leaves: list[Any] = []
    return leaves, _collect(value, leaves, {id(value)})


def _collect(value: Any, collected: list[Any], visited: set[int]) -> str:
    """Append the leaves of a value to `collected`, and return its structure; `visited` ends cycles of references."""
    import torch
    from torch.utils._pytree import tree_flatten

    leaves, structure = tree_flatten(value)
    forms = []
    for leaf in map(_as_tensor, leaves):
        contents = None if isinstance(leaf, torch.Tensor | str | bytes | int | float | None) else _contents(leaf)
        if contents is None or (leaf is not value and id(leaf) in visited):
            collected.append(leaf)
            forms.append(_form(leaf))
        else:
            visited.add(id(leaf))
            forms.append(f"{type(leaf).__name__} {_collect(contents, collected, visited)}")
    return f"{structure} {forms}"


def _contents(leaf: Any) -> dict[str, Any] | None:
    """Return the contents, by name, of an object that torch does not know as a collection; None if there are none."""
    import torch

    if isinstance(leaf, Mapping):
        return {str(key): leaf[key] for key in leaf}
    if isinstance(leaf, list | tuple):  # a subclass, which torch does not know
        return {str(index): item for index, item in enumerate(leaf)}
    if isinstance(leaf, type):
        return None
    if dataclasses.is_dataclass(leaf):
        return {field.name: getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)}
    attributes = {name: _as_tensor(value) for name, value in getattr(leaf, "__dict__", {}).items()}
    return {name: value for name, value in attributes.items() if isinstance(value, torch.Tensor | Mapping)} or None


def _as_tensor(leaf: Any) -> Any:
    """Convert a NumPy array of numbers to a tensor; return anything else (arrays of texts or objects too) unchanged."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(leaf, numpy.ndarray) or leaf.dtype.kind not in "biufc":
        return leaf
    import torch

    try:
        return torch.from_numpy(numpy.array(leaf, dtype=leaf.dtype.newbyteorder("="), order="C"))
    except TypeError:  # 80-bit floats (longdouble), which torch does not have
        return leaf


def _form(leaf: Any) -> str:
    """Return a leaf's form: kind and shape of a tensor, else the type's name.

    The width of floats is left out; a comparison of bits shows it.
    """
    import torch

    if isinstance(leaf, torch.Tensor):
        kind = "float" if leaf.is_floating_point() else str(leaf.dtype).removeprefix("torch.")
        return f"{kind}{tuple(leaf.shape)}"
    return type(leaf).__name__
