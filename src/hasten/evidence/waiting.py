"""Compute from evidence how long a training waited (for batches, at epoch starts, for its GPU), and the possible gain.

An "ordinary" step is a steady step that does not begin a pass, so the start of workers does not count as its wait.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hasten.evidence.loaders import LoaderFacts
from hasten.evidence.observed import Event, Stages
from hasten.evidence.schema import Evidence, Phase, net_seconds
from hasten.evidence.weigh import share_of, steady_seconds

PASSING = 0.5e-3
"""Seconds to pass a batch from a worker to the training process; 0.55 to 0.75 ms were measured, both sides together."""
_FULL = 0.95  # busy share of the cores from which a machine has no core left
SYNCS = ("item", "tolist", "cpu", "numpy", "nonzero", "mask", "print", "moved", "blocking_copy", "synchronize")
"""Events in which the CPU waits until the GPU has finished all work launched so far."""


@dataclass(frozen=True)
class EpochStart:
    """The start of passes through a loader; means over all passes but the first.

    Attributes:
        passes: Number of these passes.
        opening: Seconds in `iter(loader)`, which starts the workers.
        waiting: Seconds from the end of `iter(loader)` to the first batch.
        epoch: Seconds from the start of one pass to the start of the next.
    """

    passes: int
    opening: float
    waiting: float
    epoch: float

    @property
    def pause(self) -> float:
        """Seconds from the start of a pass to its first batch."""
        return self.opening + self.waiting


def loader_index(evidence: Evidence, loader: LoaderFacts) -> int:
    """Return the index of a loader in the evidence's `loaders`."""
    return next(index for index, candidate in enumerate(evidence.loaders) if candidate is loader)


def ordinary_steps(evidence: Evidence) -> list[int]:
    """Return the indices of the steady steps that do not begin a pass; of all steady steps if each begins one."""
    first_step_starts = {data_pass.start for data_pass in evidence.passes if data_pass.trained}
    steady = evidence.steady()
    return [step for step in steady if evidence.step_start[step] not in first_step_starts] or steady


def ordinary_wait(evidence: Evidence) -> float:
    """Return the mean seconds that an ordinary step waits for its batch; 0 without steps."""
    steps = ordinary_steps(evidence)
    return sum(evidence.step_phases[step][Phase.DATA] for step in steps) / len(steps) if steps else 0.0


def typical_wait(evidence: Evidence) -> float:
    """Return `ordinary_wait`, limited to twice the median: without workers, a few long waits have another cause."""
    waits = [evidence.step_phases[step][Phase.DATA] for step in ordinary_steps(evidence)]
    return min(ordinary_wait(evidence), 2 * statistics.median(waits)) if waits else 0.0


def ordinary_seconds(evidence: Evidence) -> float:
    """Return the mean seconds of an ordinary step, without validation and checkpoints; 0 without steps."""
    steps = ordinary_steps(evidence)
    return sum(net_seconds(evidence.step_phases[step]) for step in steps) / len(steps) if steps else 0.0


def data_share(evidence: Evidence) -> float:
    """Return the share of an ordinary step spent waiting for its batch, 0 to 1."""
    step = ordinary_seconds(evidence)
    return min(1.0, ordinary_wait(evidence) / step) if step > 0 else 0.0


def stages_of(evidence: Evidence, loader: LoaderFacts) -> Stages | None:
    """Return the sampled stages of a loader; None if it was not sampled, or the samples show no time."""
    index = loader_index(evidence, loader)
    return next((row for row in evidence.stages if row.loader == index and row.batches and row.seconds > 0), None)


def faster_loading(evidence: Evidence, loader: LoaderFacts, share: float) -> float:
    """Return the share of the step that would be saved if making a batch took less time by `share`.

    Without workers, that share of the wait. With workers that are the bottleneck, the whole step gets shorter in
    proportion, until the only wait left is for passing batches. Workers are no bottleneck if the wait is below 10 %.
    """
    wait, step = data_share(evidence), ordinary_seconds(evidence)
    if not loader.num_workers:
        return share * wait
    return min(share, max(0.0, wait - PASSING / step)) if wait >= 0.1 else 0.0


def mean_during(evidence: Evidence, series: Sequence[float]) -> float | None:
    """Return the mean of a series of `evidence.used` over the steady steps; None if no sample was taken in them."""
    steps = evidence.steady()
    if not steps:
        return None
    begins = evidence.step_start[steps[0]]
    ends = evidence.step_start[steps[-1]] + sum(evidence.step_phases[steps[-1]])
    values = [value for at, value in zip(evidence.used.at, series, strict=False) if begins <= at <= ends]
    return sum(values) / len(values) if values else None


def saturated(evidence: Evidence) -> float | None:
    """Return the CPU use of the training in cores, if the machine had no core left for it; None if it had, or unknown.

    Other processes may have used the rest of the cores.
    """
    used = mean_during(evidence, evidence.used.cpu)
    if used is None:
        return None
    cores, shares = evidence.machine.cores, evidence.used.cores
    busy = sum(shares) / len(shares) if shares else 0.0
    return used if used >= 0.85 * cores or (busy >= _FULL and used >= 0.2 * cores) else None


def stretch(evidence: Evidence) -> float:
    """Return the wall seconds that a second of the training's CPU time took, at least, on a machine with no core left.

    Return 1 if the machine had free cores.
    """
    used, shares = mean_during(evidence, evidence.used.cpu), evidence.used.cores
    if not used or not shares or sum(shares) / len(shares) < _FULL:
        return 1.0
    return max(1.0, 1.0 / used)


def epoch_start(evidence: Evidence, loader: LoaderFacts) -> EpochStart | None:
    """Return the start of passes through a loader; None if there was only one pass."""
    index = loader_index(evidence, loader)
    passes = [data_pass for data_pass in evidence.passes if data_pass.loader == index and data_pass.batches]
    later = passes[1:]
    epoch = (passes[-1].start - passes[0].start) / len(later) if later else 0.0
    if epoch <= 0:
        return None
    opening = [max(0.0, data_pass.opened - data_pass.start) for data_pass in later]
    waiting = [max(0.0, data_pass.first - max(data_pass.opened, data_pass.start)) for data_pass in later]
    return EpochStart(len(later), sum(opening) / len(later), sum(waiting) / len(later), epoch)


def per_step(evidence: Evidence, events: Iterable[Event]) -> float:
    """Return the seconds of these events per training step."""
    return sum(event.seconds for event in events) / evidence.steps if evidence.steps else 0.0


def device_busy(evidence: Evidence) -> float | None:
    """Return the share of time in which the GPU computed, 0 to 1; None if it was not observed.

    It is the greater of the values from the profiler, under which the CPU is slower, and from NVML.
    """
    shares = [evidence.sampled.device_busy] if evidence.sampled and evidence.sampled.device_busy is not None else []
    shares += [busy for gpu in evidence.used.gpus[:1] if (busy := mean_during(evidence, gpu.busy)) is not None]
    return max(shares) if shares else None


def waits_for_gpu(evidence: Evidence) -> list[Event]:
    """Return the events in which the CPU waited for the GPU."""
    return [event for event in evidence.events_of(*SYNCS) if event.device != "cpu"]


def worth_of_waits(evidence: Evidence, events: Sequence[Event]) -> float | None:
    """Return the share of the step saved if the CPU did not wait for the GPU in these events; None if unknown.

    Waiting for a busy GPU costs nothing, since a step cannot be shorter than its GPU's work. So all waits together
    cannot save more than the GPU's idle time, which is distributed among them.
    """
    busy = device_busy(evidence)
    all_waits = per_step(evidence, waits_for_gpu(evidence))
    if busy is None or all_waits <= 0:
        return None
    idle = (1.0 - busy) * steady_seconds(evidence)
    return share_of(evidence, per_step(evidence, events) * min(1.0, idle / all_waits))


def in_ms(seconds: float) -> str:
    """Format a time: "0.42 ms", "13 ms", "1.3 s".

    >>> in_ms(0.00042), in_ms(0.0131), in_ms(1.3)
    ('0.42 ms', '13 ms', '1.3 s')
    """
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"
