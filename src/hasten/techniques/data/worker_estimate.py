"""Estimate the gain of workers for a loader that has none."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.evidence import Evidence, LoaderFacts, Machine
from hasten.evidence.waiting import PASSING, mean_during, ordinary_seconds, typical_wait
from hasten.evidence.weigh import on_gpu

_CLEARLY = 0.05  # of the step: passive waiting must save this much more to be proposed in addition


@dataclass(frozen=True)
class Proposal:
    """Proposed workers for a loader that has none.

    Attributes:
        workers: Number of workers; 0 for none.
        seconds: Seconds that they would save per step.
        passive: Whether the training's threads must give up their cores while they wait (OMP_WAIT_POLICY=PASSIVE).
    """

    workers: int
    seconds: float
    passive: bool = False


def workers_for(evidence: Evidence, loader: LoaderFacts) -> Proposal:
    """Return the fewest workers within 2 % of the best number, and what they would save.

    With n workers a step takes the longest of: its own computation; making a batch, divided by n; the total CPU work,
    divided by the available cores. Passing a batch from a worker costs something too.

    The CPU work is measured as busy time. That includes OpenMP's threads spinning while they wait for torch's next
    operation, which they would also do beside workers. The time of a sample on one thread tells spinning from work.
    """
    wait, step, cores = typical_wait(evidence), ordinary_seconds(evidence), evidence.machine.cores
    compute, room = step - wait, room_for(evidence)
    used = mean_during(evidence, evidence.used.cpu)
    threads = 1 if on_gpu(evidence) else max(1, min(cores, evidence.flags.threads or cores))
    most = 1 if loader.iterable else cores
    fitting = [count for count in range(1, most + 1) if _fits(evidence.machine, loader, count)]
    if not fitting:
        return Proposal(0, 0.0)

    def best(make: float, work: float, passive: bool) -> Proposal:
        def step_with(workers: int) -> float:
            return max(compute + PASSING, (make + PASSING) / workers, (work + PASSING) / room)

        least = min(map(step_with, fitting))
        count = next(count for count in fitting if step_with(count) <= 1.02 * least)
        return Proposal(count, step - step_with(count), passive)

    chosen = best(wait, wait + compute * threads if used is None else used * step, passive=False)
    times = loader.probe.one_thread if loader.probe is not None else 0.0
    if times and threads > 1:
        other = best(times * wait, times * wait + compute * threads, passive=True)
        if other.seconds - chosen.seconds > _CLEARLY * step:
            chosen = other
    return chosen if chosen.seconds > 0 else Proposal(0, 0.0)


def room_for(evidence: Evidence) -> float:
    """Return the number of cores that the training may use: all, less half of what other processes used.

    Half, because those would have to share with further processes of the training. All, if use was not measured.
    """
    cores, use = evidence.machine.cores, evidence.used
    own_cores = mean_during(evidence, use.cpu)
    if own_cores is None or not use.cores:
        return cores
    beyond = max(0, len(use.cores) - cores)  # cores outside this container: other processes use those first
    others_cores = max(0.0, sum(use.cores) - own_cores - beyond)
    return max(cores / 2, cores - others_cores / 2)


def _fits(machine: Machine, loader: LoaderFacts, workers: int) -> bool:
    """Return whether two batches of each worker fit into half of /dev/shm."""
    return not machine.shm_bytes or 2 * workers * loader.batch_bytes <= machine.shm_bytes // 2
