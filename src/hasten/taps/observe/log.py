"""The book in which events are counted by kind and line."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from hasten.evidence import Event

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})
_TORCH = tuple(os.path.join(folder, "torch") + os.sep for folder in _LIBRARIES)


class _Entry:
    __slots__ = ("count", "detail", "last", "seconds", "steps")

    def __init__(self, detail: str) -> None:
        self.count = 0
        self.steps = 0
        self.last = -1
        self.seconds = 0.0
        self.detail = detail


class EventLog:
    """Counts events by kind, line and device; a note costs about a microsecond.

    Args:
        in_step: Gives the number of the step that is going on, or -1 outside every step; what happens there
            is not counted.
    """

    def __init__(self, in_step: Callable[[], int]) -> None:
        self._in_step = in_step
        self._entries: dict[tuple[str, str, str], _Entry] = {}
        self._places: dict[tuple[CodeType, int], str | None] = {}

    def note(self, kind: str, seconds: float = 0.0, device: str = "", detail: str = "", depth: int = 2) -> None:
        """Count one event of the line that called the caller (`depth` frames up), unless torch itself did."""
        step = self._in_step()
        if step < 0:
            return
        place = self.place(sys._getframe(depth))
        if place is not None:
            self.note_at(kind, place, seconds, device, detail)

    def note_at(self, kind: str, place: str, seconds: float = 0.0, device: str = "", detail: str = "") -> None:
        """Count one event of a line that is known."""
        step = self._in_step()
        if step < 0:
            return
        entry = self._entries.get((kind, place, device))
        if entry is None:
            entry = self._entries[kind, place, device] = _Entry(detail)
        entry.count += 1
        entry.seconds += seconds
        if entry.last != step:
            entry.last = step
            entry.steps += 1

    def place(self, frame: FrameType) -> str | None:
        """`file:line` of the script that this frame belongs to or was called by; None where torch acts by itself."""
        key = (frame.f_code, frame.f_lineno)
        if key in self._places:
            return self._places[key]
        name = frame.f_code.co_filename
        if name.startswith(_TORCH):
            self._places[key] = None
            return None
        if not name.startswith(("<", _OURS, *_LIBRARIES)):
            place = self._places[key] = f"{name}:{frame.f_lineno}"
            return place
        above: Any = frame.f_back
        while above is not None:  # a library's line is called from many places: this is not remembered
            name = above.f_code.co_filename
            if not name.startswith(("<", _OURS, *_LIBRARIES)):
                return f"{name}:{above.f_lineno}"
            above = above.f_back
        return None

    def facts(self) -> dict[str, Any]:
        """The events, for the evidence."""
        return {
            "events": tuple(
                Event(kind, place, entry.count, entry.steps, entry.seconds, device, entry.detail)
                for (kind, place, device), entry in self._entries.items()
            )
        }
