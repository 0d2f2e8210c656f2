"""Find and map tensors in nested batches and outputs: lists, tuples, mappings, dataclasses, distributions."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any


def map_tensors(change: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with every tensor in it replaced by `change(tensor)`.

    A container without a changed tensor is returned as the same object; one with changed tensors is copied, never
    modified in place. Other objects, and mappings that cannot be copied, are left alone with everything in them.

    Args:
        change: Returns the new tensor, or the same one.
        value: A tensor, or a nested structure of lists, tuples, mappings, dataclasses, `types.SimpleNamespace` and
            `torch.distributions` that holds some.
    """
    import torch
    from torch.distributions import Distribution, Transform
    from torch.utils._pytree import SUPPORTED_NODES, tree_map_only

    attributes_hold = Distribution, Transform, types.SimpleNamespace

    def changed(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return change(part)
        if isinstance(part, str | bytes | int | float | None):
            return part
        if isinstance(part, list | tuple):
            new = [changed(one) for one in part]
            if all(one is old for one, old in zip(new, part, strict=True)):
                return part
            if hasattr(part, "_fields"):  # a named tuple
                return type(part)(*new)
            return new if type(part) is list else type(part)(new)
        if isinstance(part, Mapping):
            different = {key: new for key, old in part.items() if (new := changed(old)) is not old}
            return _with_items(part, different) if different else part
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            fields = {field.name: getattr(part, field.name, None) for field in dataclasses.fields(part)}
            different = {name: new for name, old in fields.items() if (new := changed(old)) is not old}
            if not different:
                return part
            part = copy.copy(part)
            for name, new in different.items():
                object.__setattr__(part, name, new)  # works for frozen dataclasses too
        elif isinstance(part, attributes_hold):
            different = {name: new for name, old in vars(part).items() if (new := changed(old)) is not old}
            if different:
                part = copy.copy(part)
                vars(part).update(different)
        elif type(part) in SUPPORTED_NODES:  # a container that its library registered with torch's pytree
            return tree_map_only(torch.Tensor, change, part)
        return part

    return changed(value)


def _with_items(mapping: Any, items: dict[Any, Any]) -> Any:
    """Return a shallow copy of a mapping with some items replaced."""
    if not isinstance(mapping, MutableMapping):
        return mapping
    twin = copy.copy(mapping)
    for key, item in items.items():
        twin[key] = item
    return twin


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield every tensor in `value`, nested as for `map_tensors`."""
    found: list[Any] = []

    def note(tensor: Any) -> Any:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return iter(found)
