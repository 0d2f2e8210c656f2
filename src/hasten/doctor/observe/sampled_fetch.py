"""Replace a fetcher's `fetch` until a few of its batches have been sampled.

`SampledFetch` makes `TIMED` batches under the stage clock and the next one under the line tracer, then removes itself.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from hasten.doctor.observe.line_trace import LineTrace
from hasten.doctor.observe.stage_clock import STAGES, StageClock, StageHooks
from hasten.files import write_whole

TIMED = 2  # batches under the clock; the next one is traced

fetched: dict[int, int] = defaultdict(int)  # batches that this process has made until sampling ended, by loader
_sampling = False  # a batch is being sampled: batches of a loader in its dataset, or in another thread, are not


@dataclass
class Samples:
    """One process's samples of one loader.

    Attributes:
        batches: How many batches were timed.
        seconds: Seconds by stage, of all timed batches together.
        decoders: Seconds by the library that decoded.
        copied: Seconds in which batches were pickled to be passed to the main process.
        quickest: Least seconds that the samples of one batch took, collating left out.
        lines: Seconds of pure Python in the traced batch, by `file:line`.
        endless: The tracer was cut within the first sample: there is more Python in one sample than it counts.
    """

    batches: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    decoders: dict[str, float] = field(default_factory=dict)
    copied: float = 0.0
    quickest: float = 0.0
    lines: dict[str, float] = field(default_factory=dict)
    endless: bool = False


class SampledFetch:
    """A fetcher's `fetch` until enough of its batches have been sampled; then the fetcher's own is restored.

    Args:
        fetcher: torch's fetcher.
        index: The loader's number.
        first: How many batches of the process to skip as warm-up.
        samples: Where to add what is seen.
        file: Where a worker writes its samples; "" in the main process.
        note: Called in the main process after each sampled batch, with the error if sampling failed, else None.
    """

    def __init__(self, fetcher: Any, index: int, first: int, samples: Samples, file: str, note: Any) -> None:
        self._fetcher = fetcher
        self._plain = fetcher.fetch
        self._index = index
        self._first = first
        self._samples = samples
        self._file = file
        self._note = note
        self._dumps: Any = None

    def __call__(self, indices: Any) -> Any:
        """Make a batch as the fetcher does, sampled if its turn has come."""
        number = fetched[self._index] - self._first
        fetched[self._index] += 1
        if number < 0 or _sampling:
            return self._plain(indices)
        if number < TIMED:
            return self._timed(indices)
        self._restore()
        return self._traced(indices) if number == TIMED else self._plain(indices)

    def _timed(self, indices: Any) -> Any:
        """Make a batch under the stage clock."""
        global _sampling
        clock = StageClock()
        hooks = StageHooks(clock, self._fetcher)
        error: Exception | None = None
        _sampling = True
        try:
            if self._file and self._dumps is None:
                self._time_pickling()
            hooks.install()
        except Exception as failed:  # an unusual dataset or library version: the batch is made without the clock
            error = failed
        completed = False
        try:
            clock.start()
            batch = self._plain(indices)
            completed = True
            return batch
        finally:
            clock.stop()
            hooks.remove()
            _sampling = False
            if completed and error is None:
                self._samples.batches += 1
                add(self._samples.seconds, clock.seconds)
                add(self._samples.decoders, clock.decoders)
                making = sum(clock.seconds.values()) - clock.seconds["collate"]
                self._samples.quickest = min(making, self._samples.quickest or making)
            self._report(error)

    def _traced(self, indices: Any) -> Any:
        """Make the samples of a batch under the line tracer, then collate without it."""
        global _sampling
        collate = self._fetcher.collate_fn
        trace = LineTrace()
        if not trace.start():
            return self._plain(indices)
        _sampling = True
        in_instance = "collate_fn" in vars(self._fetcher)

        def untraced(samples: Any) -> Any:
            trace.stop()
            return collate(samples)

        self._fetcher.collate_fn = untraced
        try:
            return self._plain(indices)
        finally:
            trace.stop()
            if in_instance:
                self._fetcher.collate_fn = collate
            else:
                del self._fetcher.collate_fn
            _sampling = False
            self._samples.endless = trace.cut and trace.calls < 2
            # A cut trace is scaled to the batch; the sample in which it was cut counts as half.
            scale = len(indices) / (trace.calls - 0.5) if trace.cut and trace.calls > 1 else 1.0
            self._samples.lines = {line: seconds * scale for line, seconds in trace.python().items()}
            self._report(None)

    def _restore(self) -> None:
        """Restore the fetcher's own `fetch` and the pickler."""
        vars(self._fetcher).pop("fetch", None)
        if self._dumps is not None:
            from multiprocessing.reduction import ForkingPickler

            ForkingPickler.dumps = self._dumps  # type: ignore[method-assign]

    def _time_pickling(self) -> None:
        """Time how long batches are pickled, in which tensors are copied into shared memory.

        A worker's queue does that in its feeder thread, outside of `fetch`, so the pickler itself is wrapped.
        """
        from multiprocessing.reduction import ForkingPickler

        self._dumps = vars(ForkingPickler)["dumps"]
        plain = ForkingPickler.dumps
        samples = self._samples

        def dumps(kind: Any, obj: Any, protocol: int | None = None) -> Any:
            start = perf_counter()
            try:
                return plain(obj, protocol)
            finally:
                samples.copied += perf_counter() - start

        ForkingPickler.dumps = classmethod(dumps)  # type: ignore[method-assign, assignment]

    def _report(self, error: Exception | None) -> None:
        """In a worker, write the samples to its file, atomically; in the main process, call `note`."""
        if not self._file:
            self._note(error)
            return
        with contextlib.suppress(OSError):  # the training has ended and removed the folder: there is no reader left
            write_whole(self._file, json.dumps(vars(self._samples)), durable=False)


def add(totals: dict[str, float], added: dict[str, float]) -> None:
    """Add the values of `added` to those in `totals`, by key."""
    for name, seconds in added.items():
        totals[name] = totals.get(name, 0.0) + seconds
