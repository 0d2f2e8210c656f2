"""Profile a few whole steps with torch's profiler, and detect profilers that are not hasten's."""

from __future__ import annotations

import functools
import gzip
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hasten.doctor.observe.operators import ProfiledRow, Span
from hasten.evidence import PHASES, Phase
from hasten.evidence.recorder import Recorder
from hasten.files import write_whole

_own_threads: set[int] = set()  # threads in which hasten is building or switching its own profiler
_QUIET = ("KINETO_LOG_LEVEL", "9")  # else the profiler prints when it starts and stops


class ProfileLook:
    """Runs torch's profiler over whole steps, and records when their phases began and ended.

    Args:
        recorder: Reports the phases of steps.
        cuda: Profile the GPU too.

    Attributes:
        steps: The whole steps profiled: number, begin and end in nanoseconds since 1970.
        spans: The phases of these steps, in the same unit.
        running: Whether the profiler is on.
    """

    def __init__(self, recorder: Recorder, cuda: bool) -> None:
        from torch.profiler import ProfilerActivity
        from torch.profiler.profiler import _KinetoProfile

        self.recorder = recorder
        self.steps: list[tuple[int, int, int]] = []
        self.spans: list[Span] = []
        self.running = False
        self._open: dict[Phase, int] = {}
        self._step = -1
        self._since = 0
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
        with _own_profiler():
            self._profiler = _KinetoProfile(activities=activities, record_shapes=True)

    def prepare(self) -> None:
        """Set the profiler up, which takes seconds on a GPU the first time. Call it between steps."""
        with _own_profiler(), _quiet():
            self._profiler.prepare_trace()

    def start(self, step: int) -> None:
        """Start profiling as the step of this number begins."""
        with _own_profiler(), _quiet():
            self._profiler.start_trace()
        self.running = True
        self.recorder.listeners.append(self._mark)
        self._step, self._since = step, time.time_ns()

    def step(self, following: int) -> None:
        """End the current step; the step numbered `following` begins."""
        now = time.time_ns()
        self.steps.append((self._step, self._since, now))
        self._step, self._since = following, now

    def stop(self) -> None:
        """Stop profiling, also in the middle of a step. Call it in the thread that started it."""
        if not self.running:
            return
        self.running = False
        if self._mark in self.recorder.listeners:
            self.recorder.listeners.remove(self._mark)
        with _own_profiler():
            self._profiler.stop_trace()

    def _mark(self, phase: Phase, begins: bool) -> None:
        """Record the begin or the end of a phase (see `Recorder.listeners`)."""
        now = time.time_ns()
        if begins:
            self._open[phase] = now
        elif phase in self._open:
            self.spans.append(Span(phase, self._open.pop(phase), now))

    def rows(self) -> list[ProfiledRow]:
        """Return what ran in the whole steps, sorted by begin (outer rows before inner ones with the same begin)."""
        if not self.steps:
            return []
        first, last = self.steps[0][1], self.steps[-1][2]
        inner: Any = self._profiler.profiler
        events = inner.kineto_results.events()
        rows = []
        for event in events:
            begin = event.start_ns()
            device = event.device_type().name != "CPU"
            if first <= begin < last and event.duration_ns() >= 0:
                note = event.is_user_annotation()
                rows.append(
                    ProfiledRow(
                        name=event.name(),
                        begin=begin,
                        end=begin + event.duration_ns(),
                        thread=event.device_resource_id() if device else event.start_thread_id(),
                        shapes=() if device or note else tuple(map(tuple, event.shapes())),
                        device=device,
                        note=note,
                        key=event.correlation_id(),
                        caused_by=event.linked_correlation_id(),
                    )
                )
        return sorted(rows, key=lambda row: (row.begin, -row.end))

    def write_trace(self, path: Path) -> None:
        """Write the profile for Perfetto or chrome://tracing, with a row of steps and a row of their phases.

        The file is written atomically, and compressed if its name ends in ".gz".
        """
        with tempfile.TemporaryDirectory(prefix="hasten-trace-") as folder:
            exported = Path(folder, "trace.json")
            inner: Any = self._profiler.profiler
            inner.export_chrome_trace(str(exported))
            trace = json.loads(exported.read_bytes())
        trace["traceEvents"] += self._annotations(trace.get("baseTimeNanoseconds", 0))
        text = json.dumps(trace).encode()
        write_whole(path, gzip.compress(text, 5) if path.suffix == ".gz" else text, durable=False)

    def _annotations(self, base: int) -> Iterator[dict[str, Any]]:
        """Yield the trace events of steps and phases; `base` is the trace's zero in nanoseconds since 1970."""
        pid = os.getpid()
        for thread, name in ((1, "steps"), (2, "parts of steps")):  # shown above the real threads
            metadata = {"ph": "M", "pid": pid, "tid": thread}
            yield {**metadata, "name": "thread_name", "args": {"name": name}}
            yield {**metadata, "name": "thread_sort_index", "args": {"sort_index": thread - 3}}
        rows = [(1, f"step {number}", begin, end) for number, begin, end in self.steps]
        rows += [(2, PHASES[span.phase], span.begin, span.end) for span in self.spans]
        for thread, name, begin, end in rows:
            at = {"ts": (begin - base) / 1000, "dur": (end - begin) / 1000}
            yield {"ph": "X", "cat": "hasten", "name": name, "pid": pid, "tid": thread, **at}


@contextmanager
def _own_profiler() -> Iterator[None]:
    """Mark profilers built by this thread in the context as hasten's, not the script's."""
    _own_threads.add(threading.get_ident())
    try:
        yield
    finally:
        _own_threads.discard(threading.get_ident())


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's profiler by its environment variable, which it reads on first use, unless the user has set it."""
    name, level = _QUIET
    if name in os.environ:
        yield
        return
    os.environ[name] = level
    try:
        yield
    finally:
        os.environ.pop(name, None)


def watch_for_other_profilers(notify: Callable[[bool], None]) -> None:
    """Call `notify` when a torch profiler that is not hasten's is built, which is before it can start.

    Args:
        notify: Called with whether the profiler is the script's; else it is torch.compile's, to choose a kernel.
    """
    import torch

    for kind in (torch.profiler.profiler._KinetoProfile, torch.autograd.profiler.profile):
        _watch_class(kind, notify)


def _watch_class(kind: Any, notify: Callable[[bool], None]) -> None:
    """Wrap the constructor of a profiler class."""
    build = kind.__init__

    @functools.wraps(build)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        if threading.get_ident() not in _own_threads and getattr(self, "enabled", True):
            notify(not _is_compilers(sys._getframe(1)))

    kind.__init__ = __init__


def _is_compilers(frame: FrameType | None) -> bool:
    """Return whether a call comes from torch's compiler, which profiles to choose a kernel."""
    while frame is not None:
        if f"{os.sep}torch{os.sep}_inductor{os.sep}" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
