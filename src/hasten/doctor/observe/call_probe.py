"""Probe a few steps closely for operators with a result of unknown size, boolean masks and prints.

In the probed steps `sys.setprofile` reports each call into C, and indexing of tensors is tapped. The counts are scaled
from the probed steps to all steps. The probed steps are listed as disturbed, because probing slows them down.
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
# `torch.unique` is a Python function that calls C: frames in these files are skipped to reach the script's line.
_FORWARDING = ("torch/functional.py", "torch/_jit_internal.py", "torch/_tensor.py")
_FIRST, _IN_A_ROW = 4, 3  # probed are steps 4, 5, 6, then 12, 24, 48...


def install_call_probe(session: Session, recorder: Recorder) -> None:
    """Probe the steps from `_FIRST` on."""
    probe = CallProbe(session, recorder)
    session.observers.append(probe)
    session.step_listeners.add(probe.on_step, _FIRST)
    os.register_at_fork(after_in_child=probe.stop)  # a worker forked in a probed step inherits the profile function


class CallProbe:
    """Records, in a few steps, which C functions the script calls and which masks it indexes with."""

    def __init__(self, session: Session, recorder: Recorder) -> None:
        self._session = session
        self._recorder = recorder
        self._log = EventLog(session.in_step)
        self._steps: list[int] = []
        self._next = _FIRST  # the next step to probe
        self._probing = False
        self._calls: list[tuple[Any, float]] = []  # C functions being called, and when each began
        self._device = ""
        self._masks: dict[str, Any] = {}  # method name -> our tap on torch.Tensor, which had inherited the method

    def on_step(self, steps: int) -> int:
        """Stop probing the step that ended, and start on the next if it is to be probed.

        Returns:
            How many steps must be over at the next call.
        """
        self.stop()
        if steps >= self._next and steps == self._recorder.kept.next:
            self._next = steps + 1 if steps < _FIRST + _IN_A_ROW - 1 else 2 * steps
            self._begin(steps)
        return steps + 1 if self._probing else self._next

    def _begin(self, steps: int) -> None:
        import torch
        from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]

        if sys.getprofile() is not None or _profiler_enabled():
            return  # the script's profiler, a debugger or coverage is active: only one profile function can be set
        self._steps.append(steps)
        self._probing = True
        self._device = self._model_device()
        self._masks = _mask_taps(torch, self._log)
        sys.setprofile(self._profile)

    def stop(self) -> None:
        """Stop probing the current step. Safe to call when none is probed."""
        if not self._probing:
            return
        import torch

        if sys.getprofile() == self._profile:
            sys.setprofile(None)
        self._calls.clear()
        self._probing = False
        for name, our_tap in self._masks.items():
            if vars(torch.Tensor).get(name) is our_tap:  # else someone has patched the method since: leave theirs
                delattr(torch.Tensor, name)

    def _model_device(self) -> str:
        """Return the device type of the script's model.

        It is assumed for calls like `torch.nonzero(x)`: the profile function is given the function, not its arguments.
        """
        for watch in self._session.run.models.values():
            facts = watch.facts()
            if facts is not None and facts.device:
                return str(facts.device)
        return ""

    def _profile(self, frame: FrameType, event: str, function: Any) -> None:
        """Time a call into C. This is the profile function."""
        if event == "c_call":
            if function.__name__ in _NAMES:
                self._calls.append((function, perf_counter()))
        elif self._calls and event != "call" and self._calls[-1][0] is function:  # c_return or c_exception
            start = self._calls.pop()[1]
            with self._session.run.guard("looking at calls"):  # a function like no other
                self._record(frame, function, perf_counter() - start)

    def _record(self, frame: FrameType, function: Any, seconds: float) -> None:
        """Record a call that has returned."""
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
            return  # a function of the same name in numpy or another library
        if name == "where" and _arguments(frame) != 1:  # `where(mask)` searches; `where(mask, a, b)` only selects
            return
        outer: FrameType | None = frame
        while outer is not None and outer.f_code.co_filename.replace("\\", "/").endswith(_FORWARDING):
            outer = outer.f_back
        self._note("nonzero", outer, seconds, device, name.removeprefix("_").removesuffix("2"))

    def _note(self, kind: str, frame: FrameType | None, seconds: float, device: str, detail: str) -> None:
        place = script_place(frame)
        if place is not None:
            self._log.note_at(kind, place, seconds, device, detail)

    def facts(self) -> dict[str, Any]:
        """Return the events, scaled to all steps, and the probed steps as disturbed."""
        self.stop()
        self._next = sys.maxsize
        total = max(self._recorder.steps, len(self._steps))
        scale = total / len(self._steps) if self._steps else 1.0
        events: tuple[Event, ...] = self._log.events(scale)
        return {"events": events, "disturbed": tuple(self._steps)}


def _arguments(frame: FrameType) -> int:
    """Return the number of arguments of the call that the frame is executing.

    A profile function is not given them, but in CPython the operand of the CALL instruction is their number.
    """
    return frame.f_code.co_code[frame.f_lasti + 1]


def _mask_taps(torch: Any, log: EventLog) -> dict[str, Any]:
    """Tap the indexing of tensors with masks. Return the taps by method name."""

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
                plain(self, index, value)  # a single number is a masked fill, which needs no search
                return
            start = perf_counter()
            plain(self, index, value)
            log.note("mask", perf_counter() - start, device_of(self))

        return __setitem__

    # torch.Tensor inherits these methods, so deleting our attributes restores them. If the script has set its own, we
    # leave them alone.
    makers = {"__getitem__": getting, "__setitem__": setting}
    makers = {name: make for name, make in makers.items() if name not in vars(torch.Tensor)}
    for name, make in makers.items():
        tap(torch.Tensor, name, make)
    return {name: vars(torch.Tensor)[name] for name in makers}
