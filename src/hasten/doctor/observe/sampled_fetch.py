"""A fetcher's `fetch` while its batches are sampled, and what is seen of them."""

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

TIMED = 2  # batches under the clock; the one after them is traced

fetched: dict[int, int] = defaultdict(int)  # batches that this process has made, by loader, while they were counted
_sampling = False  # a loader inside a dataset, or a second thread, is left alone meanwhile


@dataclass
class Samples:
    """One process's samples of one loader.

    Attributes:
        copied: Seconds in which batches were made ready to be passed on.
        quickest: Seconds in which the samples of a batch were made, at the least.
        lines: Seconds of pure Python in a batch.
        endless: There was more Python in one sample than could be counted.
    """

    batches: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    decoders: dict[str, float] = field(default_factory=dict)
    copied: float = 0.0
    quickest: float = 0.0
    lines: dict[str, float] = field(default_factory=dict)
    endless: bool = False


class SampledFetch:
    """A fetcher's `fetch` until enough of its batches have been sampled; then it takes itself away."""

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
        """As the fetcher's own."""
        number = fetched[self._index] - self._first
        fetched[self._index] += 1
        if number < 0 or _sampling:
            return self._plain(indices)
        if number < TIMED:
            return self._timed(indices)
        self._over()
        return self._traced(indices) if number == TIMED else self._plain(indices)

    def _timed(self, indices: Any) -> Any:
        global _sampling
        clock = StageClock()
        hooks = StageHooks(clock, self._fetcher)
        error: Exception | None = None
        _sampling = True
        try:
            if self._file and self._dumps is None:
                self._time_passing_on()
            hooks.install()
        except Exception as failed:  # a place like no other: the batch is made without the clock
            error = failed
        made = False
        try:
            clock.start()
            batch = self._plain(indices)
            made = True
            return batch
        finally:
            clock.stop()
            hooks.remove()
            _sampling = False
            if made and error is None:
                self._samples.batches += 1
                add(self._samples.seconds, clock.seconds)
                add(self._samples.decoders, clock.decoders)
                made_in = sum(clock.seconds.values()) - clock.seconds["collate"]
                self._samples.quickest = min(made_in, self._samples.quickest or made_in)
            self._leave(error)

    def _traced(self, indices: Any) -> Any:
        global _sampling
        collate = self._fetcher.collate_fn
        trace = LineTrace()
        if not trace.start():
            return self._plain(indices)
        _sampling = True
        own = "collate_fn" in vars(self._fetcher)

        def untraced(samples: Any) -> Any:
            trace.stop()
            return collate(samples)

        self._fetcher.collate_fn = untraced
        try:
            return self._plain(indices)
        finally:
            trace.stop()
            if own:
                self._fetcher.collate_fn = collate
            else:
                del self._fetcher.collate_fn
            _sampling = False
            self._samples.endless = trace.cut and trace.calls < 2
            scale = len(indices) / (trace.calls - 0.5) if trace.cut and trace.calls > 1 else 1.0
            self._samples.lines = {line: seconds * scale for line, seconds in trace.python().items()}
            self._leave(None)

    def _over(self) -> None:
        vars(self._fetcher).pop("fetch", None)
        if self._dumps is not None:
            from multiprocessing.reduction import ForkingPickler

            ForkingPickler.dumps = self._dumps  # type: ignore[method-assign]

    def _time_passing_on(self) -> None:
        """A worker's queue pickles batches in a thread: tensors are copied into shared memory there."""
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

    def _leave(self, error: Exception | None) -> None:
        """In a worker: write what was seen, whole or not at all."""
        if not self._file:
            self._note(error)
            return
        with contextlib.suppress(OSError):  # the folder went with the training: nobody is left to read it
            write_whole(self._file, json.dumps(vars(self._samples)), durable=False)


def add(to: dict[str, float], more: dict[str, float]) -> None:
    for name, seconds in more.items():
        to[name] = to.get(name, 0.0) + seconds
