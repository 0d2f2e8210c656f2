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
    """Stand-in for no profiler: `profile` does nothing."""

    @contextlib.contextmanager
    def profile(self, action: str) -> Iterator[None]:
        """Do nothing."""
        yield


def measures(profiler: Any) -> bool:
    """Return whether a profiler measures anything; the stand-ins of hasten and of another framework do not."""
    return not isinstance(profiler, NoProfiler) and type(profiler).__name__ != "PassThroughProfiler"


def profiled(profiler: Any, label: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook or step so that a profiler times it."""
    profile = profiler.profile

    @functools.wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with profile(label):
            return method(*args, **kwargs)

    return timed


class SimpleProfiler:
    """Sums seconds and calls by hook and step method, and prints them at the end.

    Attributes:
        recorded: Hook -> seconds of each call.
    """

    def __init__(self) -> None:
        self.recorded: dict[str, list[float]] = {}

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Do nothing when a run begins."""

    @contextlib.contextmanager
    def profile(self, action: str) -> Iterator[None]:
        """Time the code inside the context."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.recorded.setdefault(action, []).append(time.perf_counter() - start)

    def summary(self) -> str:
        """Return a table, longest total first."""
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
    """Traces some training steps with torch.profiler, for Perfetto or chrome://tracing.

    Args:
        skip: Number of warm-up steps that are not traced.
        steps: Number of steps to trace.
    """

    def __init__(self, skip: int = 5, steps: int = 5) -> None:
        super().__init__()
        self._skip, self._steps = skip, steps
        self._folder = Path()
        self._profile: Any = None
        self.path: Path | None = None

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Remember the log folder, for the trace."""
        self._folder = Path(log_dir or ".")

    @contextlib.contextmanager
    def profile(self, action: str) -> Iterator[None]:
        """Time the code inside the context; trace some training steps."""
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
        """Print the path of the trace, and the table."""
        self._end()
        if self.path is not None:
            messages.tell(
                f"trace of {self._steps} training steps: {self.path} (open it in https://ui.perfetto.dev)", sys.stdout
            )
        super().describe()


PROFILERS = {"simple": SimpleProfiler, "pytorch": TraceProfiler}
