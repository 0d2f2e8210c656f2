"""The losses of a run that is tuned: whether what was switched on leaves them as those before let expect."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

_USUAL = 64  # losses that are remembered as usual
_LEAST = 4  # of them, or nothing can be said
_LEAST_ROOM = 0.1  # of the highest: so far losses may rise in any case
_UNREAD = 256  # steps


class Losses:
    """Keeps the losses of steps unread, and reads them when a block is over: a read waits for the device.

    Attributes:
        bad_before: Whether a loss was NaN or infinite with nothing on: then that is the script's own way.
    """

    def __init__(self) -> None:
        self.bad_before = False
        self._unread: deque[list[Any]] = deque(maxlen=_UNREAD)
        self._usual: deque[float] = deque(maxlen=_USUAL)

    def saw(self, losses: list[Any]) -> None:
        """A step is over, which called backward on these."""
        if losses:
            self._unread.append(losses)

    def wrong(self, on: bool, watched: bool) -> str:
        """Return what is wrong with the losses since the last look; "" where nothing is.

        Args:
            on: Whether anything was on.
            watched: Compare them with those before, too: something was on for the first time.
        """
        seen = self._read()
        if not all(map(math.isfinite, seen)):
            if on and not self.bad_before:
                return "the loss turned to NaN or infinity"
            self.bad_before = True
        finite = [loss for loss in seen if math.isfinite(loss)]
        if watched and finite and (why := self._rose(statistics.fmean(finite))):
            return why
        self._usual += finite
        return ""

    def _rose(self, mean: float) -> str:
        """Whether losses lie above all of those before by more than those lie apart."""
        if len(self._usual) < _LEAST:
            return ""
        lowest, highest = min(self._usual), max(self._usual)
        if mean <= highest + max(highest - lowest, _LEAST_ROOM * abs(highest)):
            return ""
        return f"the loss rose to {mean:.4g}; the steps before had {lowest:.4g} to {highest:.4g}"

    def _read(self) -> list[float]:
        """One read of the device for all of them."""
        import torch

        steps, self._unread = list(self._unread), deque(maxlen=_UNREAD)
        if not steps:
            return []
        sums = [torch.stack([loss.detach().float().mean() for loss in losses]).sum() for losses in steps]
        read: list[float] = torch.stack(sums).tolist()
        return read
