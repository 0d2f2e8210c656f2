"""Keep what overflows in fp16 out of the buffers that a forward updates, such as BatchNorm's running statistics.

A step whose gradients overflowed is skipped. But its forward has updated running statistics before that, and what is
infinite or NaN there stays so for good: in every later validation, and in every checkpoint.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

from hasten import messages

# Elements. Larger buffers (masks) are copied only when their version counter has moved, since that takes time;
# BatchNorm's kernels do not move it.
_SMALL = 1 << 16


@dataclasses.dataclass
class _Kept:
    """The buffers of one model at the start of a step.

    Attributes:
        listed: All floating-point buffers that the model had.
        buffers: Those of them that were finite when they were first seen, and may change.
        copies: Their values at the start of the step.
        versions: Their version counters then.
        settled: Whether the step is over, so that the next forward copies again.
    """

    listed: list[Any]
    buffers: list[Any]
    copies: list[Any]
    versions: list[int]
    settled: bool = False


class FiniteBuffers:
    """Copies of models' buffers from before a step, for those that become infinite or NaN in it."""

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[Any, _Kept] = weakref.WeakKeyDictionary()
        self._told = False

    def before_forward(self, model: Any) -> None:
        """Copy a model's buffers, if this is its first training forward of a step.

        Waits for the device only where the model has other buffers than before.
        """
        import torch

        kept = self._kept.get(model)
        if kept is not None and not kept.settled:
            return
        listed = [buffer for buffer in model.buffers() if _is_watched(buffer)]
        if kept is None or len(kept.listed) != len(listed) or any(map(_differ, kept.listed, listed)):
            buffers = [buffer for buffer in listed if bool(buffer.isfinite().all())]  # a mask may hold -inf
            copies = [buffer.detach().clone() for buffer in buffers]
            self._kept[model] = _Kept(listed, buffers, copies, [buffer._version for buffer in buffers])
            return
        stale = [
            number
            for number, (buffer, version) in enumerate(zip(kept.buffers, kept.versions, strict=True))
            if buffer.numel() <= _SMALL or buffer._version != version
        ]
        if stale:
            torch._foreach_copy_([kept.copies[n] for n in stale], [kept.buffers[n].detach() for n in stale])
        kept.versions = [buffer._version for buffer in kept.buffers]
        kept.settled = False

    def settle(self) -> None:
        """Note the end of a step: the next forward copies the buffers again."""
        for kept in self._kept.values():
            kept.settled = True

    def forget(self) -> None:
        """Watch no buffer any more: what becomes infinite from here on does so in float32, as without hasten."""
        self._kept.clear()

    def overflows(self) -> Iterator[Any]:
        """Yield a number on each device, above 0 if a buffer there is not finite any more. Waits for no device."""
        import torch

        by_kind: dict[Any, list[Any]] = {}
        for kept in self._kept.values():
            for buffer in kept.buffers:
                # `.data`: the check writes, and a graph may have saved the buffer. Multiplied by 1, it stays as it is.
                by_kind.setdefault((buffer.device, buffer.dtype), []).append(buffer.data)
        for (device, _), buffers in by_kind.items():
            overflow = torch.zeros(1, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(buffers, overflow, torch.ones(1, device=device))
            yield overflow

    def restore(self) -> bool:
        """Put values from before the step where buffers are not finite, and return whether any was. Waits for devices.

        Elements that are finite stay: they may be of other layers, or of other batches of the same step.
        """
        import torch

        if not any(bool(overflow.item()) for overflow in self.overflows()):
            return False
        with torch.no_grad():
            for kept in self._kept.values():
                for buffer, copy in zip(kept.buffers, kept.copies, strict=True):
                    # `.data`: a graph of another forward may have saved the buffer, which it does not read in training.
                    buffer.data.copy_(torch.where(buffer.isfinite(), buffer, copy))
        if not self._told:
            self._told = True
            messages.tell("hasten: precision: buffers overflowed in fp16; they are as before the step (said once)")
        return True


def _is_watched(buffer: Any) -> bool:
    import torch

    return buffer.is_floating_point() and buffer.layout is torch.strided and buffer.device.type != "meta"


def _differ(one: Any, other: Any) -> bool:
    return one is not other
