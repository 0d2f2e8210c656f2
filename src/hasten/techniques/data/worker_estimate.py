"""Estimates the gain of workers for a loader that has none."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.evidence import Evidence, LoaderFacts, Machine
from hasten.evidence.waiting import PASSING, mean_during, ordinary_seconds, typical_wait
from hasten.evidence.weigh import on_gpu

_CLEARLY = 0.05  # of the step; so much more must be saved for a further change


@dataclass(frozen=True)
class Proposal:
    """Workers for a loader that has none.

    Attributes:
        workers: How many; 0: none.
        seconds: What they would save of each step.
        passive: The training's threads must give up their cores while they wait.
    """

    workers: int
    seconds: float
    passive: bool = False


def workers_for(evidence: Evidence, loader: LoaderFacts) -> Proposal:
    """How many workers would do for a loader without any, and what they would save.

    With n workers a step takes the longest of its own computation, a batch's making shared by n, and the CPU's work
    shared by the cores it can have; a batch that a worker passes on costs something too. The fewest that come within
    2 % of the best.

    The work is what the CPU was busy with, which has in it that OpenMP's threads spin while they wait for torch's next
    operation; beside workers they would go on to. How long a sample takes on one thread tells that from work.
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
    """Cores' worth of CPU that the training may have: all, less half of what others used; all where nobody looked.

    Half, since others would have to share it with further processes of the training.
    """
    cores, use = evidence.machine.cores, evidence.used
    used = mean_during(evidence, use.cpu)
    if used is None or not use.cores:
        return cores
    beyond = max(0, len(use.cores) - cores)  # of the machine's, a container may use fewer: others have those first
    others = max(0.0, sum(use.cores) - used - beyond)
    return max(cores / 2, cores - others / 2)


def _fits(machine: Machine, loader: LoaderFacts, workers: int) -> bool:
    """Whether two batches of each worker fit into half of the machine's /dev/shm."""
    return not machine.shm_bytes or 2 * workers * loader.batch_bytes <= machine.shm_bytes // 2
