"""Switches a run as an earlier one was switched, at the same steps."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from hasten.online.switches import Switched

if TYPE_CHECKING:
    from hasten.evidence.open_pass import OpenPass
    from hasten.evidence.recorder import Recorder
    from hasten.switchboard import Switchboard

_NEVER = sys.maxsize


class Replay:
    """Told of each step and pass, as the run before was.

    Args:
        schedule: What was switched, and where.
        board: Switches techniques.
        recorder: Counts steps.
        say: Tells the person a line.
        over: Called when nobody needs to hear of steps any more.
    """

    def __init__(
        self,
        schedule: Iterable[Switched],
        board: Switchboard,
        recorder: Recorder,
        say: Callable[[str], None],
        over: Callable[[], None],
    ) -> None:
        self._left = deque(schedule)
        self._board, self._recorder, self._say, self._over = board, recorder, say, over
        self._recorder.may_rest = False
        self._pid = os.getpid()
        self._passes = 0

    def on_step(self, steps: int) -> int | None:
        """A step is over."""
        if os.getpid() != self._pid:
            return _NEVER
        self._switch(steps)
        if self._left:
            return None
        self._recorder.may_rest = True
        self._over()
        return _NEVER

    def on_pass(self, opened: OpenPass, began: bool) -> None:
        """A pass through a loader begins or is over."""
        if began or not opened.trained or os.getpid() != self._pid:
            return
        self._passes += 1
        self._switch(self._recorder.steps)

    def close(self) -> None:
        """The process ends."""
        if self._left and os.getpid() == self._pid and self._recorder.steps:
            self._say(f"replay: the run ended before step {self._left[0].step}, at which the next switch was")

    def _switch(self, steps: int) -> None:
        here = (steps, self._passes)
        while self._left and (self._left[0].step, self._left[0].passes) == here:
            self._board.switch(self._left.popleft().on)
        if self._left and self._left[0].step < steps:
            first = self._left[0]
            self._left.clear()
            self._board.switch({})
            self._say(
                f"replay: this run is another than the one that was written down: its {first.passes} passes were over "
                f"at step {first.step}, here {self._passes}; everything is switched off"
            )
