"""How long the backward of a DistributedDataParallel does nothing but wait for the sum of the gradients.

DDP times itself in some iterations, on a GPU by its own events: when the backward had computed its last gradient, and
when the last sum was there. What lies between cannot hide behind computing. It is read here, never waited for, and
at the end of the run taken out of the backward of each step that synchronised, as gradient sync.
"""

from __future__ import annotations

import statistics
import weakref
from typing import Any

from hasten.evidence import Phase
from hasten.evidence.recorder import Recorder

_TIMED_EVERY = 10  # iterations on a CPU, where a clock is cheap; torch's own default is 100
_READ_EVERY = 5  # backwards
_WARM_UP = 3  # iterations: in the second one DDP lays its buckets out again


class SyncClock:
    """What one DistributedDataParallel says of its waiting."""

    def __init__(self, module: Any) -> None:
        self._module = weakref.ref(module)
        self._backwards = 0
        self._waits: dict[int, float] = {}  # iteration -> seconds
        if next(module.parameters()).device.type == "cpu":
            module._set_ddp_runtime_logging_sample_rate(_TIMED_EVERY)

    def went_backward(self) -> None:
        """A backward that synchronised is over."""
        self._backwards += 1
        module = self._module()
        if module is None or self._backwards % _READ_EVERY:
            return
        times = module._get_ddp_logging_data()
        if "backward_comm_time" in times:
            alone = times["backward_comm_time"] - times["backward_compute_comm_overlap_time"]
            self._waits[times["iteration"]] = max(0, alone) / 1e9

    def seconds(self) -> float:
        """Return the median seconds of waiting in one backward; 0 where none was timed."""
        known = [wait for iteration, wait in self._waits.items() if iteration >= _WARM_UP] or list(self._waits.values())
        return statistics.median(known) if known else 0.0


class GradientSync:
    """Moves the waiting of all replicas from the steps' backwards to their gradient sync, when the run is over."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._synced: dict[int, list[SyncClock]] = {}  # step -> who synchronised in it
        recorder.on_close.append(self._move)

    def synced(self, clock: SyncClock) -> None:
        """A backward that synchronised is over."""
        clock.went_backward()
        if (step := self._recorder.steps) >= self._recorder.kept.next:  # of others nobody will ask
            self._synced.setdefault(step, []).append(clock)

    def _move(self) -> None:
        kept = self._recorder.kept
        for number, phases in zip(kept.numbers, kept.phases, strict=True):
            waited = sum(clock.seconds() for clock in self._synced.get(number, ()))
            moved = min(waited, phases[Phase.BACKWARD])
            phases[Phase.BACKWARD] -= moved
            phases[Phase.SYNC] += moved
