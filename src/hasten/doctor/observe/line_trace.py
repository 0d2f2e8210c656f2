"""How much of a dataset's time is pure Python, and in which line, from one batch made under `sys.settrace`.

The tracer costs ten times what a line of Python does, so the lines are not timed: they are counted, and a line costs
what its instructions cost on this machine. A sampling thread could not tell Python from C: it runs when C lets go of
the interpreter's lock, which pure Python does not do.
"""

from __future__ import annotations

import dis
import sys
from collections import defaultdict
from time import perf_counter
from types import CodeType, FrameType
from typing import Any

from hasten.doctor.observe.event_log import _OURS
from hasten.evidence.libraries import is_library

_MOST_LINES, _MOST_OF_ONE = 60_000, 600_000  # of a batch and of its first sample: some 30 and 300 ms under the tracer
_ROUNDS = 300

Line = tuple[CodeType, int]


class LineTrace:
    """Counts lines of code that is no library's, in this thread, while it is on.

    Attributes:
        calls: How often a library called such code: samples that were begun.
        cut: There were so many lines that the rest is not counted.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.cut = False
        self._instruction = min(_a_round() for _ in range(3)) / _instructions_of(_round)
        self._counts: dict[Line, int] = defaultdict(int)
        self._own: dict[CodeType, bool] = {}
        self._count = 0

    def start(self) -> bool:
        """Whether it could be switched on: not under a debugger, nor where coverage is measured."""
        if sys.gettrace() is not None:
            return False
        sys.settrace(self._call)
        return True

    def stop(self) -> None:
        """Switch it off."""
        if sys.gettrace() == self._call:
            sys.settrace(None)

    def python(self) -> dict[str, float]:
        """Seconds of pure Python by `file:line`."""
        found: dict[str, float] = defaultdict(float)
        instructions = {code: _by_line(code) for code, _ in self._counts}
        for (code, line), count in self._counts.items():
            found[f"{code.co_filename}:{line}"] += count * instructions[code].get(line, 0) * self._instruction
        return dict(found)

    def _call(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        if not self._is_own(frame.f_code):
            return None
        if frame.f_back is None or not self._is_own(frame.f_back.f_code):
            self.calls += 1
        return self._line

    def _is_own(self, code: CodeType) -> bool:
        own = self._own.get(code)
        if own is None:
            own = self._own[code] = not (code.co_filename.startswith(("<", _OURS)) or is_library(code.co_filename))
        return own

    def _line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            self._counts[frame.f_code, frame.f_lineno] += 1
            self._count += 1
            if self._count >= (_MOST_LINES if self.calls > 1 else _MOST_OF_ONE):
                self.cut = True
                sys.settrace(None)
                return None
        return self._line


def _by_line(code: CodeType) -> dict[int, int]:
    """Return how many instructions each line has."""
    counts: dict[int, int] = defaultdict(int)
    line = code.co_firstlineno
    starts = {offset: number for offset, number in dis.findlinestarts(code) if number}
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset, line)
        counts[line] += 1
    return counts


def _round(values: list[float]) -> float:
    """Lines as they stand in datasets: numbers, lists and dicts, a call, a comparison."""
    total = 0.0
    kept: list[tuple[int, float]] = []
    known = {0: 1.0, 1: 0.5}
    for index in range(_ROUNDS):
        value = values[index % 8] * 1.5 + index // 3
        if value > 3.0 and index:
            total += abs(value) % 7 / index
        kept.append((index, value + known.get(index % 3, 2.0)))
    return total


def _a_round() -> float:
    values = [float(value) for value in range(8)]
    start = perf_counter()
    _round(values)
    return perf_counter() - start


def _instructions_of(function: Any) -> float:
    """Return how many instructions `_round` runs: nearly all of its own are in the loop."""
    return float(_ROUNDS * sum(_by_line(function.__code__).values()))
