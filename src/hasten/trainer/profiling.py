"""Profilers of hooks: "simple", which sums seconds, and "pytorch", which records a trace of some steps."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hasten import messages


class NoProfiler:
    """Stands where no profiler is: `profile` does nothing."""

    @contextlib.contextmanager
    def profile(self, action: str) -> Iterator[None]:
        """Nothing."""
        yield


def measures(profiler: Any) -> bool:
    """Return whether a profiler does anything; one that another framework puts where none is does not either."""
    return not isinstance(profiler, NoProfiler) and type(profiler).__name__ != "PassThroughProfiler"


def profiled(profiler: Any, label: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook or step behind a profiler."""
    profile = profiler.profile

    @functools.wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with profile(label):
            return method(*args, **kwargs)

    return timed


class SimpleProfiler:
    """Seconds and calls by hook and step method, printed at the end.

    Attributes:
        recorded: Hook -> the seconds of each call.
    """

    def __init__(self) -> None:
        self.recorded: dict[str, list[float]] = {}

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """A run begins."""

    @contextlib.contextmanager
    def profile(self, action: str) -> Iterator[None]:
        """Time what is inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.recorded.setdefault(action, []).append(time.perf_counter() - start)

    def summary(self) -> str:
        """A table, the longest first."""
        rows = sorted(self.recorded.items(), key=lambda row: -sum(row[1]))
        lines = [f"{'seconds':>10} {'calls':>8} {'ms a call':>10}  hook"]
        for action, seconds in rows:
            total = sum(seconds)
            lines.append(f"{total:10.3f} {len(seconds):8d} {1000 * total / len(seconds):10.3f}  {action}")
        return "\n".join(lines)

    def describe(self) -> None:
        """Print the table."""
        messages.tell(self.summary(), sys.stdout)


class TraceProfiler(SimpleProfiler):
    """torch.profiler over some steps after the first; leaves a trace for Perfetto or chrome://tracing.

    Args:
        skip: Training steps that are not traced, while things warm up.
        steps: Training steps that are.
    """

    def __init__(self, skip: int = 5, steps: int = 5) -> None:
        super().__init__()
        self._skip, self._steps = skip, steps
        self._folder = Path()
        self._profile: Any = None
        self.path: Path | None = None

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """A run begins."""
        self._folder = Path(log_dir or ".")

    @contextlib.contextmanager
    def profile(self, action: str) -> Iterator[None]:
        """Time what is inside; of training steps, trace some."""
        if action.endswith(".training_step"):
            seen = len(self.recorded.get(action, ()))
            if seen == self._skip:
                self._begin()
            elif seen == self._skip + self._steps:
                self._end()
        with super().profile(action):
            yield

    def _begin(self) -> None:
        import torch

        self._profile = torch.profiler.profile()
        self._profile.__enter__()

    def _end(self) -> None:
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self._folder.mkdir(parents=True, exist_ok=True)
            self.path = self._folder / "trace.json"
            self._profile.export_chrome_trace(str(self.path))
            self._profile = None

    def describe(self) -> None:
        """Say where the trace is, and print the table."""
        self._end()
        if self.path is not None:
            messages.tell(
                f"trace of {self._steps} training steps: {self.path} (open it in https://ui.perfetto.dev)", sys.stdout
            )
        super().describe()


PROFILERS = {"simple": SimpleProfiler, "pytorch": TraceProfiler}
