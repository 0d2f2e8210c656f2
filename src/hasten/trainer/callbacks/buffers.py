"""Buffers of a module, such as BatchNorm's statistics: a copy from before a step, and whether they are spoilt."""

from __future__ import annotations

import operator
from typing import Any

import torch

from hasten.parallel.flat import by_kind
from hasten.trainer.callbacks.shared import alike, finite

_pointer = torch.Tensor.data_ptr


class BufferCopies:
    """A copy of all buffers of a module, from which they can be put back when a step is dropped.

    A forward writes to buffers before anybody knows whether its loss is finite, so a step that is dropped must undo
    that, or one NaN sample stays in BatchNorm's statistics for ever.

    Args:
        module: Whose buffers. Those registered later are copied from the next `look` on.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.look()

    def look(self) -> None:
        """Find the buffers; walking through the modules is too slow for each step."""
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
        """Copy the buffers as they are now."""
        now = [buffers.get(name) for buffers, name in self._slots]
        if len(now) != len(self._tensors) or not all(map(operator.is_, now, self._tensors)):
            self._tensors = now  # the first time, or `self.buffer = ...` put another tensor there
            self._groups = [_Group(tensors) for tensors in by_kind(one for one in now if one is not None)]
        with torch.no_grad():
            for group in self._groups:
                group.take()

    def put_back(self) -> None:
        """Give the buffers the values of the last `take`."""
        self._same_tensors()
        with torch.no_grad():
            for group in self._groups:
                torch._foreach_copy_(group.tensors, group.views)

    def put_back_if(self, flag: torch.Tensor) -> None:
        """Do the same where `flag`, one value on the device, is not 0, and do not wait for the device."""
        self._same_tensors()
        with torch.no_grad():
            for group in self._groups:
                now = torch.cat([tensor.reshape(-1) for tensor in group.tensors])
                # Not a product: NaN times 0 is NaN.
                torch.where(flag.to(now.device) != 0, group.flat, now, out=now)
                torch._foreach_copy_(group.tensors, _views(now, group.tensors))

    def _same_tensors(self) -> None:
        """Put the tensors themselves back where the forward put others."""
        for (buffers, name), tensor in zip(self._slots, self._tensors, strict=False):
            if buffers.get(name) is not tensor:
                buffers[name] = tensor

    def state_dict(self) -> list[torch.Tensor]:
        """The copies; they change with the next `take`."""
        return [group.flat.clone() for group in self._groups]

    def load_state_dict(self, kept: list[torch.Tensor]) -> None:
        """Go on with the copies of another process, where they fit."""
        self.take()
        if [one.shape for one in kept] == [group.flat.shape for group in self._groups]:
            for group, one in zip(self._groups, kept, strict=True):
                group.flat.copy_(one)


class _Group:
    """Buffers of one device and dtype, and their copies: one tensor, and its parts in their shapes."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.flat = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
        self.views = _views(self.flat, tensors)
        # The tensors' own memory in one dimension each. A CPU copies those in one operation, in place of one a tensor.
        in_one = self.flat.device.type == "cpu" and all(tensor.is_contiguous() for tensor in tensors)
        self._rows = [tensor.detach().view(-1) for tensor in tensors] if in_one else []
        self._pointers = list(map(_pointer, tensors))

    def take(self) -> None:
        """Copy the tensors as they are now."""
        if self._rows and list(map(_pointer, self.tensors)) == self._pointers:
            torch.cat(self._rows, out=self.flat)
        else:  # on a GPU, or `buffer.data = ...` gave one of them other memory
            torch._foreach_copy_(self.views, self.tensors)


def _views(flat: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def nonfinite_buffers(module: torch.nn.Module, spoilt_before: frozenset[str] = frozenset()) -> list[str]:
    """Return the names of saved buffers that hold what none should: NaN, or infinity in the statistics of a norm.

    A mask may well be full of infinities, and "not known yet" may be NaN from the start.

    Args:
        module: Whose buffers.
        spoilt_before: Names of those that held NaN when the training began.
    """
    statistics, others = {}, {}
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is None or buffer.is_meta or name in owner._non_persistent_buffers_set:
                continue
            name = f"{prefix}.{name}" if prefix else name
            if isinstance(owner, torch.nn.modules.batchnorm._NormBase):
                statistics[name] = buffer
            elif name not in spoilt_before:
                others[name] = buffer
    bad = []
    if not all(finite(group) for group in alike(statistics.values())):
        bad += [name for name, buffer in statistics.items() if not torch.isfinite(buffer).all()]
    if not all(_without_nan(group) for group in alike(others.values())):
        bad += [name for name, buffer in others.items() if torch.isnan(buffer).any()]
    return bad


def _without_nan(tensors: list[torch.Tensor]) -> bool:
    """Read the device once: the largest absolute value is NaN where any value is."""
    return not bool(torch.isnan(torch.stack(torch._foreach_norm(tensors, float("inf")))).any())
