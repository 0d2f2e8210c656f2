"""Repeat the switches of an earlier run at the same steps (`hasten run --replay`)."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from hasten.online.switches import RecordedSwitch

if TYPE_CHECKING:
    from hasten.evidence.open_pass import OpenPass
    from hasten.evidence.recorder import Recorder
    from hasten.switchboard import Switchboard

_NEVER = sys.maxsize


class Replay:
    """Listens to steps and passes, and makes each switch of a schedule at its place.

    Args:
        schedule: The switches of the earlier run.
        board: The switchboard.
        recorder: Counts steps.
        say: Prints a line for the user.
        stop_listening: Called when no further step needs to be reported.
    """

    def __init__(
        self,
        schedule: Iterable[RecordedSwitch],
        board: Switchboard,
        recorder: Recorder,
        say: Callable[[str], None],
        stop_listening: Callable[[], None],
    ) -> None:
        self._remaining = deque(schedule)
        self._board, self._recorder, self._say, self._stop_listening = board, recorder, say, stop_listening
        self._recorder.may_rest = False
        self._pid = os.getpid()
        self._passes = 0

    def on_step(self, steps: int) -> int | None:
        """Make the switches that come after this step."""
        if os.getpid() != self._pid:
            return _NEVER
        self._switch(steps)
        if self._remaining:
            return None
        self._recorder.may_rest = True
        self._stop_listening()
        return _NEVER

    def on_pass(self, opened: OpenPass, began: bool) -> None:
        """Make the switches that come after this pass, if it trained."""
        if began or not opened.trained or os.getpid() != self._pid:
            return
        self._passes += 1
        self._switch(self._recorder.steps)

    def close(self) -> None:
        """Say which switch was not reached, as the process ends."""
        if self._remaining and os.getpid() == self._pid and self._recorder.steps:
            self._say(f"replay: the run ended before step {self._remaining[0].step}, at which the next switch was")

    def _switch(self, steps: int) -> None:
        position = (steps, self._passes)
        while self._remaining and (self._remaining[0].step, self._remaining[0].passes) == position:
            self._board.switch(self._remaining.popleft().on)
        if self._remaining and self._remaining[0].step < steps:
            missed = self._remaining[0]
            self._remaining.clear()
            self._board.switch({})
            self._say(
                f"replay: this run is another than the one that was written down: its {missed.passes} passes were over "
                f"at step {missed.step}, here {self._passes}; everything is switched off"
            )
