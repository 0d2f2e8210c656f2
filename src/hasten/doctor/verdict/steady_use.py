"""Mean use of the machine while the steady steps ran."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hasten.evidence import Evidence


@dataclass(frozen=True)
class SteadyUse:
    """Means over the steady steps, in the units of `hasten.evidence.MachineUse`.

    Attributes:
        samples: Number of samples in the steady steps.
        cpu, workers: CPU use of the training's processes, and of its loader's workers, in cores.
        high_cpu: The 95th percentile of `cpu`.
        worker_count: Number of loader workers.
        machine: Share of the machine's cores that was busy with any process, 0 to 1; `others`: CPU use of other
            processes, in cores. Both over the whole run.
        waiting: Share of time in which the CPUs waited for disks, 0 to 1.
        net_in, net_out: Bytes per second of the whole machine.
        gpus: Number of GPUs that worked at all; `gpu`: the mean share of time in which they were busy, 0 to 1.
    """

    samples: int
    cpu: float
    high_cpu: float
    workers: float
    worker_count: float
    machine: float
    others: float
    waiting: float
    net_in: float
    net_out: float
    gpus: int
    gpu: float


def steady_use(evidence: Evidence) -> SteadyUse | None:
    """Return the use in the steady steps, or in the unfinished first step; None if no sample was taken in them."""
    use, steady = evidence.use, evidence.steady()
    if use is None or not use.at or not (steady or evidence.unfinished):
        return None
    if steady:
        first = evidence.step_start[steady[0]]
        last = evidence.step_start[steady[-1]] + sum(evidence.step_phases[steady[-1]])
    else:
        first, last = evidence.ended_at - sum(evidence.unfinished), evidence.ended_at
    within = [index for index, at in enumerate(use.at) if first < at <= last]
    if not within:
        return None
    busy = [_mean(gpu.busy, within) for gpu in use.gpus]
    working = [share for share in busy if share > 0.01]
    cpu = sorted(_picked(use.cpu, within)) or [0.0]
    return SteadyUse(
        samples=len(within),
        cpu=statistics.fmean(cpu),
        high_cpu=cpu[min(len(cpu) - 1, int(0.95 * len(cpu)))],
        workers=_mean(use.workers, within),
        worker_count=_mean(use.worker_count, within),
        machine=statistics.fmean(use.cores) if use.cores else 0.0,
        others=max(0.0, sum(use.cores) - statistics.fmean(use.cpu)) if use.cores and use.cpu else 0.0,
        waiting=_mean(use.waiting, within),
        net_in=_mean(use.net_in, within),
        net_out=_mean(use.net_out, within),
        gpus=len(working),
        gpu=statistics.fmean(working) if working else 0.0,
    )


def _picked(column: Sequence[float], within: Sequence[int]) -> list[float]:
    return [float(column[index]) for index in within if index < len(column)]


def _mean(column: Sequence[float], within: Sequence[int]) -> float:
    picked = _picked(column, within)
    return statistics.fmean(picked) if picked else 0.0
