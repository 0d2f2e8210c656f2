"""Estimate how much of a dataset's time is pure Python, by line, from one batch made under `sys.settrace`.

The tracer takes ten times as long as the line it traces, so lines are counted instead of timed, and each run of a line
is charged the number of its bytecode instructions times the cost of an instruction measured on this machine. A
sampling thread could not tell Python from C: it gets to run when C code releases the interpreter's lock, which pure
Python does not do.
"""

from __future__ import annotations

import dis
import sys
from collections import defaultdict
from time import perf_counter
from types import CodeType, FrameType
from typing import Any

from hasten.doctor.observe.event_log import HASTEN_FOLDER
from hasten.evidence.libraries import is_library

# Most lines to trace of a batch, and until its first sample is made: some 30 and 300 ms under the tracer.
_MOST_LINES, _MOST_OF_ONE = 60_000, 600_000
_ROUNDS = 300  # of the loop that measures the cost of an instruction

Line = tuple[CodeType, int]


class LineTrace:
    """Counts the lines that this thread runs outside of libraries, between `start` and `stop`.

    Attributes:
        calls: How often a library called such code, which is how many samples were begun.
        cut: Counting stopped early, because there were too many lines.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.cut = False
        self._instruction = min(_time_a_run() for _ in range(3)) / _instructions_of(_benchmark)
        self._counts: dict[Line, int] = defaultdict(int)
        self._own_code: dict[CodeType, bool] = {}
        self._count = 0

    def start(self) -> bool:
        """Start tracing. Return False if a debugger or a coverage tool has set a trace function already."""
        if sys.gettrace() is not None:
            return False
        sys.settrace(self._call)
        return True

    def stop(self) -> None:
        """Stop tracing."""
        if sys.gettrace() == self._call:
            sys.settrace(None)

    def python(self) -> dict[str, float]:
        """Return the estimated seconds of pure Python by `file:line`."""
        seconds: dict[str, float] = defaultdict(float)
        instructions = {code: _by_line(code) for code, _ in self._counts}
        for (code, line), count in self._counts.items():
            seconds[f"{code.co_filename}:{line}"] += count * instructions[code].get(line, 0) * self._instruction
        return dict(seconds)

    def _call(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        """Decide whether to trace a frame that begins. This is the global trace function."""
        if not self._is_own(frame.f_code):
            return None
        if frame.f_back is None or not self._is_own(frame.f_back.f_code):
            self.calls += 1
        return self._line

    def _is_own(self, code: CodeType) -> bool:
        is_own = self._own_code.get(code)
        if is_own is None:
            is_own = self._own_code[code] = not (
                code.co_filename.startswith(("<", HASTEN_FOLDER)) or is_library(code.co_filename)
            )
        return is_own

    def _line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        """Count a line. This is the local trace function of frames that are traced."""
        if event == "line":
            self._counts[frame.f_code, frame.f_lineno] += 1
            self._count += 1
            if self._count >= (_MOST_LINES if self.calls > 1 else _MOST_OF_ONE):
                self.cut = True
                sys.settrace(None)
                return None
        return self._line


def _by_line(code: CodeType) -> dict[int, int]:
    """Return the number of bytecode instructions by line."""
    counts: dict[int, int] = defaultdict(int)
    line = code.co_firstlineno
    starts = {offset: number for offset, number in dis.findlinestarts(code) if number}
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset, line)
        counts[line] += 1
    return counts


def _benchmark(values: list[float]) -> float:
    """Run lines like those in datasets: arithmetic, lists and dicts, a call, a comparison."""
    total = 0.0
    pairs: list[tuple[int, float]] = []
    weights = {0: 1.0, 1: 0.5}
    for index in range(_ROUNDS):
        value = values[index % 8] * 1.5 + index // 3
        if value > 3.0 and index:
            total += abs(value) % 7 / index
        pairs.append((index, value + weights.get(index % 3, 2.0)))
    return total


def _time_a_run() -> float:
    """Return the seconds that `_benchmark` takes."""
    values = [float(value) for value in range(8)]
    start = perf_counter()
    _benchmark(values)
    return perf_counter() - start


def _instructions_of(function: Any) -> float:
    """Return about how many instructions a run of `_benchmark` takes; nearly all of its code is in the loop."""
    return float(_ROUNDS * sum(_by_line(function.__code__).values()))
