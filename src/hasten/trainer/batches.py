"""Operations on nested batches: map over their parts, copy to a device, count samples."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def mapped(batch: Any, kind: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to every part of a type, in nested lists, tuples, named tuples, dicts and dataclasses.

    Parts of other types are kept, as the same objects.
    """
    if isinstance(batch, kind):
        return change(batch)
    if isinstance(batch, str | bytes | int | float | None):
        return batch
    if isinstance(batch, Mapping):
        parts = {key: mapped(part, kind, change) for key, part in batch.items()}
        if type(batch) is dict:
            return parts
        if isinstance(batch, defaultdict):
            return defaultdict(batch.default_factory, parts)
        if isinstance(batch, OrderedDict):
            return OrderedDict(parts)
        return _rebuilt(batch, parts)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(part, kind, change) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)([mapped(part, kind, change) for part in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        import copy

        # Not `replace`: a class may compute fields in its __init__, or take other arguments.
        changed = copy.copy(batch)
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                object.__setattr__(changed, field.name, mapped(getattr(batch, field.name), kind, change))
        return changed
    return batch


def _rebuilt(batch: Any, parts: dict[Any, Any]) -> Any:
    """Return a mapping of the same custom class with other values, or a dict if the class is read-only."""
    import copy

    changed = copy.copy(batch)
    try:
        changed.update(parts)
    except (AttributeError, TypeError):  # a read-only mapping
        return parts
    return changed


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy a batch to a device; copies to a GPU from pinned memory are asynchronous."""
    waits = device.type != "cuda"

    def move(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.to(device, non_blocking=not waits)
        moved = part.to(device)
        return part if moved is None else moved  # some `.to` methods work in place and return nothing

    return mapped(batch, MOVABLE, move)


class _MovableMeta(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return callable(getattr(instance, "to", None)) and not isinstance(instance, type)


class MOVABLE(metaclass=_MovableMeta):
    """Objects with a `.to`: tensors, packed sequences, graphs of other libraries."""


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a batch, in order."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, str):
        return
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from tensors(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from tensors(part)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from tensors(getattr(batch, field.name, None))


def batch_size(batch: Any) -> int:
    """Return the number of samples in a batch: the first tensor's first dimension; 1 for a scalar; 0 when unknown."""
    for tensor in tensors(batch):
        return int(tensor.shape[0]) if tensor.dim() else 1
    return len(batch) if isinstance(batch, str) else 0
