"""More threads compute than there are cores, and all cores are busy.

## Why it is slow

Threads that share a core wait for each other at the end of each operator, and switching between them costs time.

## How it is known

The threads of all training processes, the cores that loader workers keep busy, and the measured CPU use. The gain from
fewer threads is not known until it is tried.

## Example

```bash
OMP_NUM_THREADS=32 python train.py
```

## Use instead

```bash
OMP_NUM_THREADS=8 python train.py
```

## When the repair is safe

Results differ by rounding, since sums are divided differently.

## Source

- PyTorch performance tuning guide, CPU
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, Severity
from hasten.evidence.figures import percent
from hasten.evidence.waiting import mean_during, saturated
from hasten.evidence.weigh import COMPUTE, on_gpu, seconds_of, share_of
from hasten.techniques.compute.cpu_threads import CpuThreads


class ThreadsOversubscribed(Rule):
    cure = CpuThreads

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if no core is idle and threads, or threads and busy workers, outnumber the cores."""
        environment, use, cores = evidence.surroundings, evidence.use, evidence.machine.cores
        if (
            environment is None
            or use is None
            or on_gpu(evidence)
            or not environment.threads
            or saturated(evidence) is None
        ):
            return None
        working = mean_during(evidence, use.workers) or 0.0
        processes = max(1, environment.processes)
        threads = environment.threads * processes
        crowded = threads > cores or threads + working > 1.5 * cores
        if not crowded:
            return None
        threads_each = max(1, round((cores - working) / processes))
        if threads_each >= environment.threads:
            return None
        compute = share_of(evidence, seconds_of(evidence, *COMPUTE))
        in_processes = f" in {processes} processes" if processes > 1 else ""
        beside_workers = f" beside loader workers that keep {working:.1f} busy" if working >= 0.5 else ""
        # More threads than cores, and not as many as OMP_NUM_THREADS says: only the script can have asked for them.
        by_script = environment.threads not in (environment.omp_threads, min(cores, environment.threads))
        fix = (
            f"the script asks for them, whatever OMP_NUM_THREADS is: make that torch.set_num_threads({threads_each})"
            if by_script
            else f"set OMP_NUM_THREADS={threads_each} (or torch.set_num_threads({threads_each}) at the start)"
        )
        return cls.finding(
            f"{threads} threads compute{in_processes} on {cores} cores{beside_workers}, and no core is idle: "
            "threads wait for each other",
            fix,
            Severity.MEDIUM if compute >= 0.2 else Severity.NOTE,
            details=(f"forward and backward, which these threads compute, take {percent(compute)} of the step",),
            setting=str(threads_each),
        )
