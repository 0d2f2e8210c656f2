"""Probes a few steps closely: searches with a result of unknown size, masks, prints.

In these steps Python tells of each call into C (`sys.setprofile`), and indexing of tensors is replaced. What was seen
counts for all steps in the same share; the steps themselves are listed as disturbed.
"""

from __future__ import annotations

import builtins
import os
import sys
from time import perf_counter
from types import FrameType
from typing import Any

from hasten.doctor.observe.event_log import EventLog, device_of, script_place
from hasten.evidence import Event
from hasten.evidence.recorder import Recorder
from hasten.taps.protocol import Session
from hasten.taps.wrapping import tap

_SEARCHES = {"nonzero", "argwhere", "masked_select", "where", "_unique2", "unique_dim", "unique_consecutive"}
_WRITES = {"print", "write", "writelines", "flush", "fsync", "writerow", "writerows"}
_NAMES = _SEARCHES | _WRITES
_FILES = ("TextIOWrapper", "BufferedWriter", "FileIO", "writer")
_FORWARDING = ("torch/functional.py", "torch/_jit_internal.py", "torch/_tensor.py")  # unique is Python first
_FIRST, _IN_A_ROW = 4, 3  # steps 4, 5, 6, then 12, 24, 48...


def install_call_probe(session: Session, recorder: Recorder) -> None:
    """Begin to look at the first steps."""
    probe = CallProbe(session, recorder)
    session.observers.append(probe)
    session.steps_over.tell(probe.on_step, _FIRST)
    os.register_at_fork(after_in_child=probe.stop)  # a loader's worker that starts in such a step is not looked into


class CallProbe:
    """Looks closely into a few steps."""

    def __init__(self, session: Session, recorder: Recorder) -> None:
        self._session = session
        self._recorder = recorder
        self._log = EventLog(session.in_step)
        self._steps: list[int] = []
        self._next = _FIRST  # the step to look into next
        self._looking = False
        self._calls: list[tuple[Any, float]] = []  # those that are going on
        self._device = ""
        self._masks: dict[str, Any] = {}  # ours, where torch has inherited them

    def on_step(self, steps: int) -> int:
        """A step is over: stop looking, or begin."""
        self.stop()
        if steps >= self._next and steps == self._recorder.kept.next:
            self._next = steps + 1 if steps < _FIRST + _IN_A_ROW - 1 else 2 * steps
            self._begin(steps)
        return steps + 1 if self._looking else self._next

    def _begin(self, steps: int) -> None:
        import torch
        from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]

        if sys.getprofile() is not None or _profiler_enabled():
            return  # somebody else's profiler is at work
        self._steps.append(steps)
        self._looking = True
        self._device = self._devices()
        self._masks = _mask_taps(torch, self._log)
        sys.setprofile(self._see)

    def stop(self) -> None:
        """Look no more."""
        if not self._looking:
            return
        import torch

        if sys.getprofile() == self._see:
            sys.setprofile(None)
        self._calls.clear()
        self._looking = False
        for name, ours in self._masks.items():
            if vars(torch.Tensor).get(name) is ours:  # else somebody's function stands in front of it
                delattr(torch.Tensor, name)

    def _devices(self) -> str:
        """Type of the device on which the model is: of a call like `torch.nonzero(x)` the tensor is not told."""
        for watch in self._session.run.models.values():
            facts = watch.facts()
            if facts is not None and facts.device:
                return str(facts.device)
        return ""

    def _see(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            if function.__name__ in _NAMES:
                self._calls.append((function, perf_counter()))
        elif self._calls and event != "call" and self._calls[-1][0] is function:  # c_return or c_exception
            start = self._calls.pop()[1]
            with self._session.run.guard("looking at calls"):  # a function like no other
                self._over(frame, function, perf_counter() - start)

    def _over(self, frame: FrameType, function: Any, seconds: float) -> None:
        name, owner = function.__name__, getattr(function, "__self__", None)
        if name in _WRITES:
            if (name == "print" and function is builtins.print) or name == "fsync" or type(owner).__name__ in _FILES:
                self._note("log", frame, seconds, "", name)
            return
        import torch

        if isinstance(owner, torch.Tensor):
            device = device_of(owner)
        elif str(getattr(function, "__module__", "")).startswith("torch"):
            device = self._device
        else:
            return  # numpy's and others'
        if name == "where" and _arguments(frame) != 1:
            return
        above: FrameType | None = frame
        while above is not None and above.f_code.co_filename.replace("\\", "/").endswith(_FORWARDING):
            above = above.f_back
        self._note("nonzero", above, seconds, device, name.removeprefix("_").removesuffix("2"))

    def _note(self, kind: str, frame: FrameType | None, seconds: float, device: str, detail: str) -> None:
        place = script_place(frame)
        if place is not None:
            self._log.note_at(kind, place, seconds, device, detail)

    def facts(self) -> dict[str, Any]:
        """The events, counted for all steps, and the steps that were looked into."""
        self.stop()
        self._next = sys.maxsize
        total = max(self._recorder.steps, len(self._steps))
        scale = total / len(self._steps) if self._steps else 1.0
        events: tuple[Event, ...] = self._log.events(scale)
        return {"events": events, "disturbed": tuple(self._steps)}


def _arguments(frame: FrameType) -> int:
    """How many arguments the call is made with that the frame is at: CPython's instruction for calls tells it."""
    return frame.f_code.co_code[frame.f_lasti + 1]


def _mask_taps(torch: Any, log: EventLog) -> dict[str, Any]:
    """Tap the indexing of tensors; return what was put there, by name."""

    def is_mask(index: Any) -> bool:
        if isinstance(index, tuple):
            return any(is_mask(part) for part in index)
        return type(index) is torch.Tensor and index.dtype in (torch.bool, torch.uint8)

    def getting(plain: Any) -> Any:
        def __getitem__(self: Any, index: Any) -> Any:
            if torch.compiler.is_compiling() or not is_mask(index):
                return plain(self, index)
            start = perf_counter()
            value = plain(self, index)
            log.note("mask", perf_counter() - start, device_of(self))
            return value

        return __getitem__

    def setting(plain: Any) -> Any:
        def __setitem__(self: Any, index: Any, value: Any) -> None:
            if torch.compiler.is_compiling() or not is_mask(index) or not hasattr(value, "numel") or value.numel() < 2:
                plain(self, index, value)  # a single number fills where the mask is, without a search
                return
            start = perf_counter()
            plain(self, index, value)
            log.note("mask", perf_counter() - start, device_of(self))

        return __setitem__

    # torch inherits them; taking ours away leaves what was there.
    makers = {"__getitem__": getting, "__setitem__": setting}
    makers = {name: make for name, make in makers.items() if name not in vars(torch.Tensor)}
    for name, make in makers.items():
        tap(torch.Tensor, name, make)
    return {name: vars(torch.Tensor)[name] for name in makers}
