"""Copies from the CPU to a device: of tensors that no loader gave, and of a loader's with the CPU waiting.

Only where there is a device: on a machine without one every `to` is left as it is.
"""

from __future__ import annotations

import functools
from collections import deque
from time import perf_counter
from typing import Any

from hasten.doctor.observe.event_log import EventLog, device_of
from hasten.taps.protocol import Session
from hasten.taps.wrapping import tap

_REMEMBERED = 4  # batches: one that is trained on, some that were fetched ahead


def tap_copies(session: Session, log: EventLog, anyway: bool = False) -> None:
    """Set the taps, if this machine has a GPU (or `anyway`)."""
    import torch
    from torch.utils.data import dataloader

    if not (anyway or torch.cuda.is_available()):
        return
    given = _LoaderBatches()
    tap(dataloader._BaseDataLoaderIter, "__next__", functools.partial(_remembering, given=given, session=session))
    for name in ("to", "cuda"):
        tap(torch.Tensor, name, functools.partial(_watched, given=given, log=log, session=session))


class _LoaderBatches:
    """The storages of the last batches that loaders gave."""

    def __init__(self) -> None:
        # Weak references hold no memory of the batch, but keep the storage's address from being given to another.
        self._batches: deque[dict[int, Any]] = deque(maxlen=_REMEMBERED)
        self._blind = False  # a batch came in which no tensor was found: whose a tensor is cannot be said

    def add(self, batch: Any) -> None:
        """Remember a batch's tensors, in whatever they come: collections, or an object's attributes."""
        import torch
        from torch.multiprocessing.reductions import StorageWeakRef
        from torch.utils._pytree import tree_iter

        parts = [part for part in tree_iter(batch) if isinstance(part, torch.Tensor)]
        if not parts and hasattr(batch, "__dict__"):
            parts = [part for part in tree_iter(vars(batch)) if isinstance(part, torch.Tensor)]
        self._blind = self._blind or not parts
        storages = [part.untyped_storage() for part in parts]
        self._batches.append({storage._cdata: StorageWeakRef(storage) for storage in storages})

    def has(self, tensor: Any) -> bool | None:
        """Whether a loader gave this tensor, or what it is a view of; None where that cannot be said."""
        storage = tensor.untyped_storage()._cdata
        return any(storage in batch for batch in self._batches) or (None if self._blind else False)


def _remembering(plain: Any, given: _LoaderBatches, session: Session) -> Any:
    def __next__(self: Any) -> Any:
        batch = plain(self)
        try:
            given.add(batch)
        except Exception as error:  # a batch like no other
            session.run.skip("remembering a batch", error)
        return batch

    return __next__


def _watched(plain: Any, given: _LoaderBatches, log: EventLog, session: Session) -> Any:
    from torch.compiler import is_compiling

    def copy(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or log.in_step() < 0:
            return plain(self, *args, **kwargs)
        start = perf_counter()
        moved = plain(self, *args, **kwargs)
        if moved is not self:
            seconds = perf_counter() - start
            try:
                event = _what_was_copied(self, moved, args, kwargs, given)
            except Exception as error:  # a tensor like no other
                session.run.skip("observing a copy", error)
                event = None
            if event is not None:
                log.note(event[0], seconds, event[1], event[2])
        return moved

    return copy


def _what_was_copied(
    tensor: Any, moved: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: _LoaderBatches
) -> tuple[str, str, str] | None:
    """Kind, device and detail of the event that a copy was; None where it was none."""
    source, target = device_of(tensor), device_of(moved)
    if source == target:
        return None
    if target == "cpu":
        return "cpu", source, ""
    if source != "cpu":
        return None
    loaders = given.has(tensor)
    if loaders is None:
        return None
    if not loaders:
        return "moved", target, str(tuple(tensor.shape))
    pinned = tensor.is_pinned()
    if pinned and (kwargs.get("non_blocking") or any(arg is True for arg in args)):
        return None
    return "blocking_copy", target, "pinned" if pinned else "pageable"
