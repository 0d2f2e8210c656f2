"""What spawned ranks are sent: tensors of their own, not one memory for all of them."""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch


class ByValue:
    """A value that each process it is sent to gets a copy of, its tensors too.

    torch sends a tensor on the CPU as shared memory. Ranks that train one module would then all step the same
    weights, each adding its update to those of the others. Tensors that were shared before stay so: a person's
    counter, say. What shares memory within the value (tied weights) still does in the copy.

    Args:
        value: Anything that can be sent to a process that is being started.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        written = io.BytesIO()
        _Copying(written, pickle.HIGHEST_PROTOCOL).dump(self.value)
        return _read, (written.getvalue(),)


def _read(written: bytes) -> ByValue:
    return ByValue(pickle.loads(written))  # from the process that started this one


class _Copying(ForkingPickler):
    """Writes tensors as bytes, each piece of memory once."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.storage.TypedStorage):  # a new one for each tensor: the memory below is one object
            return _typed, (value._untyped_storage, value.dtype)
        if isinstance(value, torch.UntypedStorage) and value.device.type == "cpu" and not value.is_shared():
            return _memory, (torch.empty(0, dtype=torch.uint8).set_(value).numpy().tobytes(),)
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not _is_shared(value):
            return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _is_shared(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_shared()


def _typed(memory: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)


def _memory(written: bytes) -> torch.UntypedStorage:
    if not written:
        return torch.UntypedStorage(0)
    return torch.frombuffer(bytearray(written), dtype=torch.uint8).untyped_storage()
