"""A tune's budget: how long its parts may take, and what they took."""

from __future__ import annotations

import time

_BLOCK_SECONDS = (0.5, 1.0)
_BLOCKS_OF_A_RUN = 8  # of a training so short that longer ones would be too few
_SHORTEST_BLOCK = 0.1  # seconds
_CHECKED_STEPS = (2, 6)  # a pass in the check
_SLOW_STEP = 0.5  # seconds: of slower ones one pass is checked, not two
_ONE_THREAD = 2.0  # times as long as on all cores, roughly, a step takes in the check


class Spent:
    """What the seconds of a tune went to: each goes to the stage that was named last.

    Args:
        start: Moment (`time.monotonic`) at which the tune began.
    """

    def __init__(self, start: float) -> None:
        self._stage, self._since = "start", start
        self._seconds: dict[str, float] = {}

    def on(self, stage: str) -> None:
        """Count what comes from here on as this stage's."""
        now = time.monotonic()
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now

    def seconds(self) -> dict[str, float]:
        """Seconds of each stage until now, in the order in which they began."""
        self.on(self._stage)
        return dict(self._seconds)


def block_seconds(budget: float, training: float) -> float:
    """Seconds of a block: the longer the budget the longer, and some of them fit into a short training."""
    least, most = _BLOCK_SECONDS
    return min(most, max(least, budget / 300), max(_SHORTEST_BLOCK, training / _BLOCKS_OF_A_RUN))


def checked_passes(step: float) -> int:
    """Passes that the check compares, where a step takes so many seconds."""
    return 1 if step > _SLOW_STEP else 2


def checked_steps(budget: float, step: float) -> int:
    """Steps a pass that the check compares."""
    least, most = _CHECKED_STEPS
    return max(least, min(most, int(budget / 8 / max(2 * step * _ONE_THREAD, 1e-6))))


def check_seconds(budget: float, step: float, startup: float) -> float:
    """Seconds that the check of one plan takes, roughly."""
    steps = checked_steps(budget, step) * checked_passes(step)
    return 2.5 * startup + 2 + 2 * steps * step * _ONE_THREAD
