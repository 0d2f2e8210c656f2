"""CPU memory is returned to the kernel at each step and faulted in again.

## Why it is slow

glibc returns large freed blocks to the kernel. The next tensor of that size gets fresh pages, which the kernel zeroes
at their first touch; each page costs about 2 us.

## How it is known

hasten reads page faults and the kernel's CPU time between steps of the same pass, after the warm-up, and divides the
time by the number of cores that the training used. Other stretches do not count: validation has page faults of its
own, and after a fork of loader workers all memory is faulted in once more. Where glibc was switched during the run
between keeping and returning memory, the worth is the difference in step time.

## Example

```bash
python train.py
```

## Use instead

```bash
hasten run train.py
```

## When the repair is safe

Always: results are bit-identical. The process holds more memory between steps.

## Source

- PyTorch performance tuning guide, CPU
- glibc manual, Memory Allocation Tunables
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import pairwise

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown, MemoryPoint
from hasten.evidence.waiting import in_ms, mean_during, stretch
from hasten.evidence.weigh import is_sure, on_gpu, share_of, switched
from hasten.techniques.base import toml_value
from hasten.techniques.memory.allocator import TUNABLES, Allocator

_MANY = 500  # pages per step: 2 MiB
_CERTAIN = 0.05  # least share of the step: where counts predicted 6 %, switching showed a gain of 0 to 3 %
_PAGE = 2e-6  # seconds per page fault: 1.5 to 2.7 us in the virtual machine where this was measured


class PagesFaultedAgain(Rule):
    cure = Allocator
    tried = "glibc"

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding for a CPU training in which repeated page faults cost at least 5 % of the step.

        A smaller share counts only if switching glibc during the run showed a certain gain.
        """
        points = [point for point in evidence.memory if point.faults is not None and point.system is not None]
        # The first third is warm-up: memory is touched for the first time.
        stretches = _undivided(evidence, points[len(points) // 3 :])
        environment = evidence.surroundings
        # A preloaded library has replaced glibc's allocator already.
        if on_gpu(evidence) or not stretches or (environment is not None and environment.preload):
            return None
        faults, seconds, grown = _per_step(stretches)
        # Newly grown memory must be faulted in whatever the allocator does.
        if (refaults := faults - max(0.0, grown)) < _MANY:
            return None
        available = next(
            (name for name in ("glibc", "jemalloc", "tcmalloc") if not Allocator.useless(name, evidence.machine)), ""
        )
        # The training's threads fault in parallel, each on its own core, so wall time is CPU time divided by the cores.
        cores = max(1.0, mean_during(evidence, evidence.used.main) or 1.0)
        worth = share_of(evidence, min(seconds, refaults * _PAGE) / cores * stretch(evidence))
        if worth < _CERTAIN and not is_sure(evidence, cls.name):
            return None
        worth, how_known, live = switched(evidence, cls.name, worth, HowKnown.ESTIMATED)
        return cls.timed(
            f"memory is given back to the kernel and faulted in again, {refaults * 4096 / 2**20:.0f} MiB a step, which "
            f"takes {in_ms(seconds)} of the kernel's CPU time",
            f"start the training with `hasten run`, or with GLIBC_TUNABLES={TUNABLES}",
            worth,
            how_known,
            details=(*live, "it may happen in one run of a script and not in the next: the top of the heap decides"),
            setting=toml_value(available or "glibc"),
        )


def _undivided(evidence: Evidence, points: list[MemoryPoint]) -> list[tuple[MemoryPoint, MemoryPoint]]:
    """Return consecutive points between which no pass through a loader begins or ends."""
    numbers = [evidence.number(index) for index in range(len(evidence.step_start))]

    def at(point: MemoryPoint) -> float:
        """Return the start time of the first recorded step from the point on; infinity after the last one."""
        index = bisect_left(numbers, point.step)
        return evidence.step_start[index] if index < len(numbers) else math.inf

    borders = sorted(
        moment for data_pass in evidence.passes for moment in (data_pass.start, data_pass.first, data_pass.end)
    )
    return [
        (before, after)
        for before, after in pairwise(points)
        if after.step > before.step and bisect_right(borders, at(before)) == bisect_right(borders, at(after))
    ]


def _per_step(stretches: list[tuple[MemoryPoint, MemoryPoint]]) -> tuple[float, float, float]:
    """Return page faults, kernel CPU seconds and pages of memory growth, each per step of these stretches."""
    steps = sum(after.step - before.step for before, after in stretches)
    faults = sum((after.faults or 0) - (before.faults or 0) for before, after in stretches)
    seconds = sum((after.system or 0.0) - (before.system or 0.0) for before, after in stretches)
    return faults / steps, seconds / steps, sum(after.rss - before.rss for before, after in stretches) / 4096 / steps
