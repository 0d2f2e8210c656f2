"""Find and map tensors in nested batches and outputs: lists, tuples, mappings, dataclasses, distributions."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any


def map_tensors(change: Callable[[Any], Any], value: Any, in_place: bool = False) -> Any:
    """Return `value` with every tensor in it replaced by `change(tensor)`.

    A container without a changed tensor is returned as the same object. Other objects, and mappings that cannot be
    copied, are left alone with everything in them, as is a container inside itself.

    Args:
        change: Returns the new tensor, or the same one.
        value: A tensor, or a nested structure of lists, tuples, mappings, dataclasses, `types.SimpleNamespace` and
            `torch.distributions` that holds some.
        in_place: Put changed tensors into the lists, mappings and objects that held the old ones. If False, a container
            with changed tensors is copied.
    """
    import torch
    from torch.distributions import Distribution, Transform
    from torch.utils._pytree import SUPPORTED_NODES, tree_map_only

    attributes_hold = Distribution, Transform, types.SimpleNamespace
    around: set[int] = set()

    def changed(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return change(part)
        if isinstance(part, str | bytes | int | float | None) or id(part) in around:
            return part
        around.add(id(part))
        try:
            return changed_inside(part)
        finally:
            around.discard(id(part))

    def changed_inside(part: Any) -> Any:
        if isinstance(part, list | tuple):
            return _sequence(part, [changed(one) for one in part], in_place)
        if isinstance(part, Mapping):
            different = {key: new for key, old in part.items() if (new := changed(old)) is not old}
            return _with_items(part, different, in_place) if different else part
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            fields = {field.name: getattr(part, field.name, None) for field in dataclasses.fields(part)}
            different = {name: new for name, old in fields.items() if (new := changed(old)) is not old}
            if not different:
                return part
            part = part if in_place else copy.copy(part)
            for name, new in different.items():
                object.__setattr__(part, name, new)  # works for frozen dataclasses too
        elif isinstance(part, attributes_hold):
            different = {name: new for name, old in vars(part).items() if (new := changed(old)) is not old}
            if different:
                part = part if in_place else copy.copy(part)
                vars(part).update(different)
        elif type(part) in SUPPORTED_NODES:  # a container that its library registered with torch's pytree
            return tree_map_only(torch.Tensor, change, part)
        return part

    return changed(value)


def _sequence(part: Any, new: list[Any], in_place: bool) -> Any:
    """Return a list or tuple with these elements: the same object if they are the same, or if it can be changed."""
    if all(new_entry is old_entry for new_entry, old_entry in zip(new, part, strict=True)):
        return part
    if in_place and isinstance(part, list):
        for index, new_entry in enumerate(new):
            if new_entry is not part[index]:
                part[index] = new_entry
        return part
    if hasattr(part, "_fields"):  # a named tuple
        return type(part)(*new)
    return new if type(part) is list else type(part)(new)


def _with_items(mapping: Any, items: dict[Any, Any], in_place: bool) -> Any:
    """Return a mapping with some items replaced: the same object (`in_place`), or a shallow copy."""
    if not isinstance(mapping, MutableMapping):
        return mapping
    twin = mapping if in_place else copy.copy(mapping)
    for key, item in items.items():
        twin[key] = item
    return twin


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield every tensor in `value`, nested as for `map_tensors`."""
    tensors: list[Any] = []

    def note(tensor: Any) -> Any:
        tensors.append(tensor)
        return tensor

    map_tensors(note, value)
    return iter(tensors)
