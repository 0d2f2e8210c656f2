"""How a training waited: for batches, at the starts of epochs, for its GPU; and what less waiting would bring."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hasten.evidence.loaders import LoaderFacts
from hasten.evidence.observed import Event, Stages
from hasten.evidence.schema import Evidence, Phase, net_seconds
from hasten.evidence.weigh import share_of, steady_seconds

PASSING = 0.5e-3
"""Seconds that a batch costs which a worker made and passed on: 0.55 to 0.75 ms measured here, on both sides."""
_FULL = 0.95  # share of the cores that is busy in a machine that has none left
SYNCS = ("item", "tolist", "cpu", "numpy", "nonzero", "mask", "print", "moved", "blocking_copy", "synchronize")
"""Events in which the CPU waits until the GPU has done all that was asked of it so far."""


@dataclass(frozen=True)
class EpochStart:
    """How the passes through a loader begin; means over all passes but the first.

    Attributes:
        passes: How many these are.
        opening: Seconds in `iter(loader)`, in which workers are started.
        waiting: Seconds from there to the first batch.
        epoch: Seconds from the start of one pass to that of the next.
    """

    passes: int
    opening: float
    waiting: float
    epoch: float

    @property
    def pause(self) -> float:
        """Both."""
        return self.opening + self.waiting


def loader_index(evidence: Evidence, loader: LoaderFacts) -> int:
    """Return which of the evidence's loaders this is."""
    return next(index for index, one in enumerate(evidence.loaders) if one is loader)


def ordinary_steps(evidence: Evidence) -> list[int]:
    """The steady steps that do not begin a pass; all steady ones where each of them does."""
    begun = {over.start for over in evidence.passes if over.trained}
    steady = evidence.steady()
    return [step for step in steady if evidence.step_start[step] not in begun] or steady


def ordinary_wait(evidence: Evidence) -> float:
    """Mean seconds that an ordinary step waits for its batch; 0 without steps."""
    steps = ordinary_steps(evidence)
    return sum(evidence.step_phases[step][Phase.DATA] for step in steps) / len(steps) if steps else 0.0


def typical_wait(evidence: Evidence) -> float:
    """As `ordinary_wait`, but no more than twice its median: without workers a few long waits are somebody else's."""
    waits = [evidence.step_phases[step][Phase.DATA] for step in ordinary_steps(evidence)]
    return min(ordinary_wait(evidence), 2 * statistics.median(waits)) if waits else 0.0


def ordinary_seconds(evidence: Evidence) -> float:
    """Mean seconds of an ordinary step, without validation and checkpoints; 0 without steps."""
    steps = ordinary_steps(evidence)
    return sum(net_seconds(evidence.step_phases[step]) for step in steps) / len(steps) if steps else 0.0


def data_share(evidence: Evidence) -> float:
    """Share of the ordinary step that waits for its batch, 0 to 1."""
    step = ordinary_seconds(evidence)
    return min(1.0, ordinary_wait(evidence) / step) if step > 0 else 0.0


def stages_of(evidence: Evidence, loader: LoaderFacts) -> Stages | None:
    """Return where this loader's time goes, if it was sampled and anything was seen."""
    index = loader_index(evidence, loader)
    return next((one for one in evidence.stages if one.loader == index and one.batches and one.seconds > 0), None)


def faster_loading(evidence: Evidence, loader: LoaderFacts, share: float) -> float:
    """Share of the step that is saved if a batch were made in less time by `share`.

    Without workers that is so much of the wait. With workers that are the bottleneck the whole step gets shorter with
    their work, until only the passing of batches is waited for; they are no bottleneck where little is.
    """
    wait, step = data_share(evidence), ordinary_seconds(evidence)
    if not loader.num_workers:
        return share * wait
    return min(share, max(0.0, wait - PASSING / step)) if wait >= 0.1 else 0.0


def mean_during(evidence: Evidence, series: Sequence[float]) -> float | None:
    """Return the mean of a series of `evidence.used` over the steady steps; None where no sample fell into them."""
    steps = evidence.steady()
    if not steps:
        return None
    begins = evidence.step_start[steps[0]]
    ends = evidence.step_start[steps[-1]] + sum(evidence.step_phases[steps[-1]])
    values = [value for at, value in zip(evidence.used.at, series, strict=False) if begins <= at <= ends]
    return sum(values) / len(values) if values else None


def saturated(evidence: Evidence) -> float | None:
    """Cores' worth of CPU that the training used, if the machine had none left for it; None if it had, or unknown.

    Others may have taken what the training did not.
    """
    used = mean_during(evidence, evidence.used.cpu)
    if used is None:
        return None
    cores, shares = evidence.machine.cores, evidence.used.cores
    whole = sum(shares) / len(shares) if shares else 0.0
    return used if used >= 0.85 * cores or (whole >= _FULL and used >= 0.2 * cores) else None


def stretch(evidence: Evidence) -> float:
    """Wall seconds that a second of the training's CPU took at the least, where others filled the machine; else 1."""
    used, shares = mean_during(evidence, evidence.used.cpu), evidence.used.cores
    if not used or not shares or sum(shares) / len(shares) < _FULL:
        return 1.0
    return max(1.0, 1.0 / used)


def epoch_start(evidence: Evidence, loader: LoaderFacts) -> EpochStart | None:
    """Return how passes through this loader begin; None unless a pass began after another was over."""
    index = loader_index(evidence, loader)
    passes = [over for over in evidence.passes if over.loader == index and over.batches]
    later = passes[1:]
    epoch = (passes[-1].start - passes[0].start) / len(later) if later else 0.0
    if epoch <= 0:
        return None
    opening = [max(0.0, over.opened - over.start) for over in later]
    waiting = [max(0.0, over.first - max(over.opened, over.start)) for over in later]
    return EpochStart(len(later), sum(opening) / len(later), sum(waiting) / len(later), epoch)


def per_step(evidence: Evidence, events: Iterable[Event]) -> float:
    """Seconds that these events took per training step."""
    return sum(event.seconds for event in events) / evidence.steps if evidence.steps else 0.0


def device_busy(evidence: Evidence) -> float | None:
    """Share of time in which the GPU computed, 0 to 1; None where nobody saw.

    The greater of what the profiler saw, under which the CPU is slower, and what NVML saw.
    """
    seen = [evidence.sampled.device_busy] if evidence.sampled and evidence.sampled.device_busy is not None else []
    seen += [busy for gpu in evidence.used.gpus[:1] if (busy := mean_during(evidence, gpu.busy)) is not None]
    return max(seen) if seen else None


def waits_for_gpu(evidence: Evidence) -> list[Event]:
    """Return the events in which the CPU waited for the GPU."""
    return [event for event in evidence.events_of(*SYNCS) if event.device != "cpu"]


def worth_of_waits(evidence: Evidence, events: Sequence[Event]) -> float | None:
    """Share of the step that is saved if the CPU did not wait for the GPU in these events; None where that is unknown.

    Waiting for a GPU that is busy costs nothing: a step cannot be shorter than the work of its GPU. So all waits
    together cannot save more than the time in which the GPU has nothing to do, which is shared out among them.
    """
    busy = device_busy(evidence)
    all_waits = per_step(evidence, waits_for_gpu(evidence))
    if busy is None or all_waits <= 0:
        return None
    idle = (1.0 - busy) * steady_seconds(evidence)
    return share_of(evidence, per_step(evidence, events) * min(1.0, idle / all_waits))


def in_ms(seconds: float) -> str:
    """A time in words: "0.42 ms", "13 ms", "1.3 s".

    >>> in_ms(0.00042), in_ms(0.0131), in_ms(1.3)
    ('0.42 ms', '13 ms', '1.3 s')
    """
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"
