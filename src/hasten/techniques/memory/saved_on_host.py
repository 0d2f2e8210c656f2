"""Saved-tensor hooks that keep what autograd saves in a forward on the host until the backward asks for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_iter

LEAST = 1 << 20  # bytes: smaller tensors are not worth a copy
_ALIGNED = 16  # bytes: on a tensor at another address, a kernel may take another path than on its aligned copy
_detach = torch._C.TensorBase.detach


class OnHost(saved_tensors_hooks):
    """Hooks for one forward.

    Args:
        device: Type of the device whose tensors are moved.
        module: The module; its parameters and buffers stay, since they exist anyway.
        arguments: Its arguments, which stay for the same reason.
    """

    def __init__(self, device: str, module: torch.nn.Module, arguments: Any) -> None:
        super().__init__(self._pack, _unpack)
        self._device = device
        existing = [*module.parameters(), *module.buffers(), *tree_iter(arguments)]
        self._staying = {_memory_of(tensor) for tensor in existing if _is_plain(tensor)}

    def _pack(self, tensor: Tensor) -> _OnDevice | _MovedToHost:
        return _MovedToHost(tensor) if self._is_moved(tensor) else _OnDevice(tensor)

    def _is_moved(self, tensor: Tensor) -> bool:
        """Return whether a saved tensor is moved: it is large, not there anyway, and can be restored exactly."""
        return (
            _is_plain(tensor)
            and tensor.device.type == self._device
            and tensor.numel() * tensor.element_size() >= LEAST
            and not tensor.is_conj()
            and not tensor.is_neg()
            and _memory_of(tensor) not in self._staying
            and tensor.data_ptr() % _ALIGNED == 0
            and not _overlaps(tensor)
        )


class _OnDevice:
    """A saved tensor that stays on its device, detached: an output in its own graph would keep the graph alive."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = _detach(tensor)
        self.version = tensor._version

    def restored(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: It was changed in place since. autograd does not check that for tensors saved through hooks.
        """
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {self.tensor._version}; expected "
                f"version {self.version} instead"
            )
        return self.tensor


class _MovedToHost:
    """A saved tensor that was copied to the host.

    Both copies are made in the forward's stream. So later kernels wait for them, and so does the reuse of the tensor's
    memory for another tensor.
    """

    __slots__ = ("device", "host", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.device, self.stride = tensor.device, tensor.stride()
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
        self.host.copy_(_detach(tensor), non_blocking=True)

    def restored(self) -> Tensor:
        """Return the tensor with its former strides, on its device."""
        host = self.host
        return torch.empty_strided(host.shape, self.stride, dtype=host.dtype, device=self.device).copy_(
            host, non_blocking=True
        )


def _unpack(saved: _OnDevice | _MovedToHost) -> Tensor:
    return saved.restored()


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _overlaps(tensor: Tensor) -> bool:
    """Return whether two elements may share a memory location, as after `expand`."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
