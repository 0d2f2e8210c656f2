"""Watch the losses of a run that is tuned: do they stay where they were before a technique was switched on?"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

_USUAL = 64  # losses that are remembered for comparison
_LEAST = 4  # remembered losses needed for a comparison
_LEAST_ROOM = 0.1  # of the highest loss: a rise up to that is always accepted
_UNREAD = 256  # steps whose losses are kept until they are read


class Losses:
    """Collects losses on the device and reads them once per block, since each read waits for the device.

    Attributes:
        bad_before: Whether a loss was NaN or infinite with nothing on: then no technique is blamed for it.
    """

    def __init__(self) -> None:
        self.bad_before = False
        self._unread: deque[list[Any]] = deque(maxlen=_UNREAD)
        self._remembered: deque[float] = deque(maxlen=_USUAL)

    def add(self, losses: list[Any]) -> None:
        """Take in the losses on which the last step called backward."""
        if losses:
            self._unread.append(losses)

    def problem(self, on: bool, watched: bool) -> str:
        """Return what is wrong with the losses since the last call; "" if nothing is.

        Args:
            on: Whether any technique was on.
            watched: Also compare them with earlier losses, because a technique was on for the first time.
        """
        losses = self._read()
        if not all(map(math.isfinite, losses)):
            if on and not self.bad_before:
                return "the loss turned to NaN or infinity"
            self.bad_before = True
        finite = [loss for loss in losses if math.isfinite(loss)]
        if watched and finite and (why := self._rose(statistics.fmean(finite))):
            return why
        self._remembered += finite
        return ""

    def _rose(self, mean: float) -> str:
        """Return a message if the mean lies above all earlier losses by more than their range; else ""."""
        if len(self._remembered) < _LEAST:
            return ""
        lowest, highest = min(self._remembered), max(self._remembered)
        if mean <= highest + max(highest - lowest, _LEAST_ROOM * abs(highest)):
            return ""
        return f"the loss rose to {mean:.4g}; the steps before had {lowest:.4g} to {highest:.4g}"

    def _read(self) -> list[float]:
        """Return the collected losses, one number per step, with a single copy from the device."""
        import torch

        steps, self._unread = list(self._unread), deque(maxlen=_UNREAD)
        if not steps:
            return []
        sums = [torch.stack([loss.detach().float().mean() for loss in losses]).sum() for losses in steps]
        values: list[float] = torch.stack(sums).tolist()
        return values
