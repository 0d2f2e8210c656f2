"""Copy a module's buffers (such as BatchNorm's statistics) before a step, restore them, and find corrupt ones.

`BufferCopies` copies the buffers before each step and restores them when the step is dropped. To keep that cheap,
buffers of one device and dtype are copied into one flat tensor. `nonfinite_buffers` names the buffers that must not be
saved.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from hasten.parallel.flat import by_kind
from hasten.trainer.callbacks.shared import alike, finite

_pointer = torch.Tensor.data_ptr


class BufferCopies:
    """A copy of all buffers of a module, used to restore them when a step is dropped.

    The forward pass writes to buffers before anybody knows whether its loss is finite. A dropped step must undo those
    writes; otherwise one NaN sample would stay in BatchNorm's statistics for good.

    Args:
        module: The module whose buffers are copied. A buffer registered later is copied from the next `look` on.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.look()

    def look(self) -> None:
        """Find the buffers. Walking through all modules is too slow to do at each step."""
        seen: set[int] = set()
        self._slots: list[tuple[dict[str, Any], str]] = []
        for owner in self._module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and buffer.layout == torch.strided and id(buffer) not in seen:
                    seen.add(id(buffer))
                    self._slots.append((owner._buffers, name))
        self._tensors: list[Any] = []
        self._groups: list[_Group] = []

    def take(self) -> None:
        """Copy the current buffers."""
        now = [buffers.get(name) for buffers, name in self._slots]
        # Compare identity: an in-place change (`running_mean.mul_()`) keeps the tensor, so its group still fits.
        if len(now) != len(self._tensors) or not all(map(operator.is_, now, self._tensors)):
            self._tensors = now  # the first time, or `self.buffer = ...` replaced a tensor
            self._groups = [_Group(tensors) for tensors in by_kind(tensor for tensor in now if tensor is not None)]
        with torch.no_grad():
            for group in self._groups:
                group.take()

    def put_back(self) -> None:
        """Restore the buffers to the values of the last `take`."""
        self._same_tensors()
        with torch.no_grad():
            for group in self._groups:
                torch._foreach_copy_(group.tensors, group.views)

    def put_back_if(self, flag: torch.Tensor) -> None:
        """Restore the buffers if `flag`, a single value on the device, is not 0, without waiting for the device."""
        self._same_tensors()
        with torch.no_grad():
            for group in self._groups:
                now = torch.cat([tensor.reshape(-1) for tensor in group.tensors])
                # `where` rather than multiplying by the flag: NaN times 0 is NaN.
                torch.where(flag.to(now.device) != 0, group.flat, now, out=now)
                torch._foreach_copy_(group.tensors, _views(now, group.tensors))

    def _same_tensors(self) -> None:
        """Put the original tensor objects back where the forward replaced them."""
        for (buffers, name), tensor in zip(self._slots, self._tensors, strict=False):
            if buffers.get(name) is not tensor:
                buffers[name] = tensor

    def state_dict(self) -> list[torch.Tensor]:
        """Return a clone of the copies, one flat tensor per group."""
        return [group.flat.clone() for group in self._groups]

    def load_state_dict(self, copies: list[torch.Tensor]) -> None:
        """Take over the copies of another process, unless their number or shapes differ."""
        self.take()
        if [copy.shape for copy in copies] == [group.flat.shape for group in self._groups]:
            for group, copy in zip(self._groups, copies, strict=True):
                group.flat.copy_(copy)


class _Group:
    """Buffers of one device and dtype, and their copies.

    The copies are stored in one flat tensor; `views` are its parts in the buffers' shapes.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.flat = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
        self.views = _views(self.flat, tensors)
        # 1-d views of the tensors' own memory: on a CPU, one torch.cat copies them all, instead of one copy per tensor.
        contiguous_on_cpu = self.flat.device.type == "cpu" and all(tensor.is_contiguous() for tensor in tensors)
        self._rows = [tensor.detach().view(-1) for tensor in tensors] if contiguous_on_cpu else []
        self._pointers = list(map(_pointer, tensors))

    def take(self) -> None:
        """Copy the current tensors."""
        if self._rows and list(map(_pointer, self.tensors)) == self._pointers:
            torch.cat(self._rows, out=self.flat)
        else:  # on a GPU, not contiguous, or `buffer.data = ...` gave a buffer other memory
            torch._foreach_copy_(self.views, self.tensors)


def _views(flat: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Split a flat tensor into views with the shapes of these tensors."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def nonfinite_buffers(module: torch.nn.Module, spoilt_before: frozenset[str] = frozenset()) -> list[str]:
    """Return the names of saved buffers with invalid values: NaN, or infinity in the statistics of a norm layer.

    Infinity elsewhere is allowed (an attention mask may be full of it), and so is NaN that was there from the start (a
    placeholder for "not known yet").

    Args:
        module: The module whose buffers are checked.
        spoilt_before: Names of the buffers that held NaN when the training began.
    """
    statistics, plain_buffers = {}, {}
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is None or buffer.is_meta or name in owner._non_persistent_buffers_set:
                continue
            name = f"{prefix}.{name}" if prefix else name
            if isinstance(owner, torch.nn.modules.batchnorm._NormBase):
                statistics[name] = buffer
            elif name not in spoilt_before:
                plain_buffers[name] = buffer
    bad = []
    if not all(finite(group) for group in alike(statistics.values())):
        bad += [name for name, buffer in statistics.items() if not torch.isfinite(buffer).all()]
    if not all(_without_nan(group) for group in alike(plain_buffers.values())):
        bad += [name for name, buffer in plain_buffers.items() if torch.isnan(buffer).any()]
    return bad


def _without_nan(tensors: list[torch.Tensor]) -> bool:
    """Read the device once: the largest absolute value is NaN where any value is."""
    return not bool(torch.isnan(torch.stack(torch._foreach_norm(tensors, float("inf")))).any())
