"""Counts events by kind and line."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from types import CodeType, FrameType
from typing import Any

from hasten.evidence import Event, libraries
from hasten.taps.protocol import Session

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_GENERATED = ("<eval_with_key>", "<frozen")  # code that torch or Python made up


class Whose(Enum):
    """Who wrote a line of code."""

    OURS = auto()
    TORCH = auto()
    LIBRARY = auto()
    SCRIPT = auto()


@dataclass(slots=True)
class _Entry:
    kind: str
    place: str
    device: str
    detail: str
    count: int = 0
    steps: int = 0
    last: int = -1
    seconds: float = 0.0


class EventLog:
    """Counts events by kind, line and device; a note costs about half a microsecond.

    Args:
        in_step: Gives the number of the step that is going on, or -1 outside every step; what happens there
            is not counted, unless it is noted as `anywhere`.
    """

    def __init__(self, in_step: Callable[[], int]) -> None:
        self.in_step = in_step
        self._entries: dict[tuple[str, str, str], _Entry] = {}
        # By instruction, which is quicker to tell than a line; the code is kept so that its id stays its own.
        self._seen: dict[tuple[str, str, int, int], tuple[CodeType, _Entry | None]] = {}

    def note(self, kind: str, seconds: float = 0.0, device: str = "", detail: str = "", anywhere: bool = False) -> None:
        """Count one event of the line that called the caller, unless torch itself did.

        Args:
            kind: One of `hasten.evidence.EVENTS`.
            seconds: How long it took.
            device: Type of the tensor's device.
            detail: What else tells; kept of the first event of a line.
            anywhere: Count it outside of training steps too.
        """
        step = self.in_step()
        if step < 0 and not anywhere:
            return
        frame = sys._getframe(2)
        key = (kind, device, id(frame.f_code), frame.f_lasti)
        found = self._seen.get(key)
        if found is None:
            place = script_place(frame)
            entry = None if place is None else self._entry(kind, place, device, detail)
            if place is None or not is_library(frame):  # a library's line is called from many: not remembered
                self._seen[key] = (frame.f_code, entry)
        else:
            entry = found[1]
        if entry is not None:
            _count(entry, step, seconds)

    def note_at(
        self, kind: str, place: str, seconds: float = 0.0, device: str = "", detail: str = "", step: int | None = None
    ) -> None:
        """Count one event of a line that is known, in `step` (-1: outside of any) or in the one that is going on."""
        if step is None:
            step = self.in_step()
            if step < 0:
                return
        _count(self._entry(kind, place, device, detail), step, seconds)

    def _entry(self, kind: str, place: str, device: str, detail: str) -> _Entry:
        entry = self._entries.get((kind, place, device))
        if entry is None:
            entry = self._entries[kind, place, device] = _Entry(kind, place, device, detail)
        return entry

    def events(self, scale: float = 1.0) -> tuple[Event, ...]:
        """The events so far, with counts and times multiplied by `scale`."""
        return tuple(
            Event(
                entry.kind,
                entry.place,
                max(1, round(entry.count * scale)),
                max(entry.steps, round(entry.steps * scale)),
                entry.seconds * scale,
                entry.device,
                entry.detail,
            )
            for entry in list(self._entries.values())
            if entry.count
        )

    def facts(self) -> dict[str, Any]:
        """The events, for the evidence."""
        return {"events": self.events()}


def _count(entry: _Entry, step: int, seconds: float) -> None:
    entry.count += 1
    entry.seconds += seconds
    if entry.last != step:
        entry.last = step
        entry.steps += step >= 0


def event_log(session: Session) -> EventLog:
    """The session's one log of events, made when it is first asked for."""
    log = next((observer for observer in session.observers if isinstance(observer, EventLog)), None)
    if log is None:
        session.observers.append(log := EventLog(session.in_step))
    return log


def is_library(frame: FrameType) -> bool:
    """Whether the frame is not the script's own: a library's, the standard library's, ours, or generated code."""
    name = frame.f_code.co_filename
    return name.startswith((*_GENERATED, _OURS)) or libraries.is_library(name)


def script_place(frame: FrameType | None, past_torch: bool = False) -> str | None:
    """`file:line` of the script that this frame belongs to, or was called by; None where torch acts by itself.

    Args:
        frame: Where to begin.
        past_torch: Look above torch's frames too: the frame is in torch since the script called torch there.
    """
    while frame is not None:
        owner = whose(frame.f_code.co_filename)
        if owner is Whose.SCRIPT:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if owner is Whose.TORCH and not past_torch:
            return None
        past_torch = past_torch or owner is Whose.LIBRARY  # another library did it, called by way of a module
        frame = frame.f_back
    return None


@functools.cache
def whose(name: str) -> Whose:
    """Return whose code a file of this name holds."""
    if libraries.is_torch(name) or name.startswith(_GENERATED):
        return Whose.TORCH
    if name.startswith(_OURS):
        return Whose.OURS
    return Whose.LIBRARY if libraries.is_library(name) or _is_made_up(name) else Whose.SCRIPT


def _is_made_up(name: str) -> bool:
    """Whether a file's name is that of no file: "<string>" of a dataclass's methods, but not of `python -c`."""
    return name.startswith("<") and not name.startswith(("<string>", "<stdin>", "<ipython"))


def device_of(tensor: Any) -> str:
    """Return the type of a tensor's device, asked past any subclass of the script's own."""
    import torch

    if type(tensor) is torch.Tensor:
        return "cpu" if tensor.is_cpu else tensor.device.type
    with torch._C.DisableTorchFunctionSubclass():
        return str(tensor.device.type)
