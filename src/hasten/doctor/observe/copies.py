"""Record copies between the CPU and a device that training could avoid or overlap.

Three kinds of event: a loader's batch copied to the device while the CPU waits (`blocking_copy`), a tensor that no
loader yielded copied to the device (`moved`), and a tensor copied back to the CPU (`cpu`). To tell the first two
apart, the storages of the last few batches are remembered. Without a GPU, `Tensor.to` is not tapped at all.
"""

from __future__ import annotations

import functools
from collections import deque
from time import perf_counter
from typing import Any

from hasten.doctor.observe.event_log import EventLog, device_of
from hasten.taps.protocol import Session
from hasten.taps.wrapping import tap

_REMEMBERED = 4  # batches: the current one, and some that a prefetcher has drawn ahead


def tap_copies(session: Session, log: EventLog, anyway: bool = False) -> None:
    """Tap loaders, `Tensor.to` and `Tensor.cuda`, if this machine has a GPU (or `anyway`)."""
    import torch
    from torch.utils.data import dataloader

    if not (anyway or torch.cuda.is_available()):
        return
    batches = _LoaderBatches()
    tap(dataloader._BaseDataLoaderIter, "__next__", functools.partial(_remembering, batches=batches, session=session))
    for name in ("to", "cuda"):
        tap(torch.Tensor, name, functools.partial(_watched, batches=batches, log=log, session=session))


class _LoaderBatches:
    """The storages of the last batches that loaders yielded."""

    def __init__(self) -> None:
        # A weak reference does not keep the batch's memory, but keeps torch from reusing the address of the storage
        # (`_cdata`), by which it is recognised.
        self._batches: deque[dict[int, Any]] = deque(maxlen=_REMEMBERED)
        self._incomplete = False  # some batch hid its tensors, so an unknown tensor may be from a loader

    def add(self, batch: Any) -> None:
        """Remember the storages of a batch's tensors, found in nested collections or in an object's attributes."""
        import torch
        from torch.multiprocessing.reductions import StorageWeakRef
        from torch.utils._pytree import tree_iter

        tensors = [tensor for tensor in tree_iter(batch) if isinstance(tensor, torch.Tensor)]
        if not tensors and hasattr(batch, "__dict__"):
            tensors = [tensor for tensor in tree_iter(vars(batch)) if isinstance(tensor, torch.Tensor)]
        self._incomplete = self._incomplete or not tensors
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._batches.append({storage._cdata: StorageWeakRef(storage) for storage in storages})

    def has(self, tensor: Any) -> bool | None:
        """Return whether a loader yielded this tensor or its base; None if that is unknown."""
        storage = tensor.untyped_storage()._cdata
        return any(storage in batch for batch in self._batches) or (None if self._incomplete else False)


def _remembering(plain: Any, batches: _LoaderBatches, session: Session) -> Any:
    """Wrap a loader iterator's `__next__` to remember its batches."""

    def __next__(self: Any) -> Any:
        batch = plain(self)
        try:
            batches.add(batch)
        except Exception as error:  # an unusual batch, such as one whose attributes raise: a tap never breaks a script
            session.run.skip("remembering a batch", error)
        return batch

    return __next__


def _watched(plain: Any, batches: _LoaderBatches, log: EventLog, session: Session) -> Any:
    """Wrap `Tensor.to` or `Tensor.cuda` to note the copies it makes."""
    from torch.compiler import is_compiling

    def copy(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or log.in_step() < 0:
            return plain(self, *args, **kwargs)
        start = perf_counter()
        moved = plain(self, *args, **kwargs)
        if moved is not self:
            seconds = perf_counter() - start
            try:
                event = _event_of_copy(self, moved, args, kwargs, batches)
            except Exception as error:  # an unusual tensor, such as a subclass without a storage
                session.run.skip("observing a copy", error)
                event = None
            if event is not None:
                log.note(event[0], seconds, event[1], event[2])
        return moved

    return copy


def _event_of_copy(
    tensor: Any, moved: Any, args: tuple[Any, ...], kwargs: dict[str, Any], batches: _LoaderBatches
) -> tuple[str, str, str] | None:
    """Return the kind, device and detail of the event to note for a copy; None if there is nothing to note."""
    source, target = device_of(tensor), device_of(moved)
    if source == target:
        return None
    if target == "cpu":
        return "cpu", source, ""
    if source != "cpu":
        return None
    from_loader = batches.has(tensor)
    if from_loader is None:
        return None
    if not from_loader:
        return "moved", target, str(tuple(tensor.shape))
    pinned = tensor.is_pinned()
    if pinned and (kwargs.get("non_blocking") or any(arg is True for arg in args)):
        return None
    return "blocking_copy", target, "pinned" if pinned else "pageable"
