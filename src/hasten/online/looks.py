"""When a run under `--auto` measures again after its search: whether the choice still helps, and what may be better.

A search of half a minute leaves techniques in doubt. Comparing two sets takes a second, so the training itself, which
goes on for long, is where the doubts can be settled. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hasten.online.course import Course

_LONGEST = 64  # the interval between two looks doubles up to this factor while they confirm the choice
_SOONER = 0.2  # of that interval: rivals are about as fast as the chosen set, so that comparing them costs less
_SAME_INTERVAL = 4  # rivals compared before the interval to the next doubles


@dataclass(frozen=True)
class Look:
    """Two sets to compare, and the number of the step at which to do so."""

    step: int
    pair: tuple[frozenset[int], frozenset[int]]


class Looks:
    """Decides what is compared next with the chosen set: nothing at all, or a rival that may be faster.

    Args:
        course: The search, which is over.
        interval: Returns the number of steps between two looks while these candidates are on.
    """

    def __init__(self, course: Course, interval: Callable[[frozenset[int]], int]) -> None:
        self._course, self._interval = course, interval
        self._chosen: frozenset[int] = frozenset()
        self._apart, self._looks, self._rivals = 1, 0, 0
        self._plain_at = 0  # the step of the next comparison with nothing on; 0 if it is not set
        self._rival: frozenset[int] | None = None

    def next(self, chosen: frozenset[int], untried: frozenset[int], steps: int) -> Look:
        """Return the next look.

        Args:
            chosen: Candidates that are chosen.
            untried: Candidates that have never acted, as no pass has begun yet, and that are on from the next pass.
            steps: Steps of the training so far.
        """
        if chosen != self._chosen:
            self._chosen, self._apart, self._plain_at = chosen, 1, 0
        interval = self._interval(chosen | untried)
        self._plain_at = self._plain_at or steps + self._apart * interval
        self._rival, rival_at = None, steps + int(_SOONER * interval * 2 ** (self._rivals // _SAME_INTERVAL))
        if untried:
            return self._in_turn(self._plain_at, chosen | untried, chosen)
        if rival_at < self._plain_at and (rival := self._course.rival()) is not None:
            self._rival = rival
            return self._in_turn(rival_at, rival, chosen)
        return self._in_turn(self._plain_at, chosen, frozenset())

    def _in_turn(self, step: int, one: frozenset[int], other: frozenset[int]) -> Look:
        self._looks += 1
        return Look(step, (one, other) if self._looks % 2 else (other, one))

    def compared(self) -> None:
        """Take in that the pair of the last look was measured: a rival that is surely faster becomes the choice."""
        if self._rival is not None:
            self._rivals += 1
            self._course.prefer(self._rival)
        else:
            self._apart, self._plain_at = min(_LONGEST, 2 * self._apart), 0
