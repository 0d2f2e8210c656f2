"""A tune's budget: how long its parts may take, and how long they took."""

from __future__ import annotations

import time

_BLOCK_SECONDS = (0.5, 1.0)
_BLOCKS_OF_A_RUN = 8  # blocks that must fit into a short training; they are shortened until they do
_SHORTEST_BLOCK = 0.1  # seconds
_CHECKED_STEPS = (2, 6)  # least and most steps per pass in the check
_SLOW_STEP = 0.5  # seconds: with slower steps, one pass is checked instead of two
_ONE_THREAD = 2.0  # rough slowdown of a step in the check, which computes on one thread


class TimeSpent:
    """Stopwatch of a tune's stages: time counts for the stage that was named last.

    Args:
        start: Moment (`time.monotonic`) at which the tune began.
    """

    def __init__(self, start: float) -> None:
        self._stage, self._since = "start", start
        self._seconds: dict[str, float] = {}

    def begin(self, stage: str) -> None:
        """Count the time from here on for this stage."""
        now = time.monotonic()
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage until now, in the order in which they began."""
        self.begin(self._stage)
        return dict(self._seconds)


def block_seconds(budget: float, training: float) -> float:
    """Return the seconds of a block: longer with a longer budget, shorter in a short training."""
    least, most = _BLOCK_SECONDS
    return min(most, max(least, budget / 300), max(_SHORTEST_BLOCK, training / _BLOCKS_OF_A_RUN))


def checked_passes(step: float) -> int:
    """Return how many passes the check compares, given the seconds of a step."""
    return 1 if step > _SLOW_STEP else 2


def checked_steps(budget: float, step: float) -> int:
    """Return how many steps per pass the check compares."""
    least, most = _CHECKED_STEPS
    return max(least, min(most, int(budget / 8 / max(2 * step * _ONE_THREAD, 1e-6))))


def check_seconds(budget: float, step: float, startup: float) -> float:
    """Return a rough estimate of the seconds that checking one plan takes, a second look at a difference included."""
    steps = checked_steps(budget, step) * checked_passes(step)
    return 6 * startup + 3 + 4 * steps * step * _ONE_THREAD
