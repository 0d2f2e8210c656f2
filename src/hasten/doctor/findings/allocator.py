"""CPU memory is given back to the kernel at each step and faulted in again.

## Why it is slow

glibc returns large freed blocks to the kernel. The next tensor of that size gets fresh pages, and the kernel zeroes
each one at its first touch, some 2 us a page.

## How it is known

Page faults and the kernel's CPU time between steps of one pass, after the warm-up, divided by the cores that the
training used. Validation has faults of its own, and where workers are forked all memory is faulted in once more.
Where glibc was told to keep memory and not to, in turn, in the run itself: by what that showed.

## Example

```bash
python train.py
```

## Use instead

```bash
hasten run train.py
```

## When the repair is safe

Always: results stay the same to the bit. The process keeps more memory between steps.

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

_MANY = 500  # pages a step: 2 MiB
_CERTAIN = 0.05  # share of the step from which on it shows: 6 % by such counts was 0 to 3 % when tried
_PAGE = 2e-6  # seconds a page fault costs: 1.5 to 2.7 us in the virtual machine this was measured in


class PagesFaultedAgain(Rule):
    cure = Allocator
    tried = "glibc"

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return at most one finding."""
        points = [one for one in evidence.memory if one.faults is not None and one.system is not None]
        stretches = _undivided(evidence, points[len(points) // 3 :])
        around = evidence.surroundings
        if on_gpu(evidence) or not stretches or (around is not None and around.preload):
            return None
        faults, seconds, grown = _per_step(stretches)
        # Pages of memory that only grows are no fault of the allocator.
        if (again := faults - max(0.0, grown)) < _MANY:
            return None
        here = next(
            (name for name in ("glibc", "jemalloc", "tcmalloc") if not Allocator.useless(name, evidence.machine)), ""
        )
        # All of the training's threads fault, each on its own core.
        cores = max(1.0, mean_during(evidence, evidence.used.main) or 1.0)
        worth = share_of(evidence, min(seconds, again * _PAGE) / cores * stretch(evidence))
        if worth < _CERTAIN and not is_sure(evidence, cls.name):
            return None
        worth, how_known, live = switched(evidence, cls.name, worth, HowKnown.ESTIMATED)
        return cls.timed(
            f"memory is given back to the kernel and faulted in again, {again * 4096 / 2**20:.0f} MiB a step, which "
            f"takes {in_ms(seconds)} of the kernel's CPU time",
            f"start the training with `hasten run`, or with GLIBC_TUNABLES={TUNABLES}",
            worth,
            how_known,
            details=(*live, "it may happen in one run of a script and not in the next: the top of the heap decides"),
            setting=toml_value(here or "glibc"),
        )


def _undivided(evidence: Evidence, points: list[MemoryPoint]) -> list[tuple[MemoryPoint, MemoryPoint]]:
    """Points that follow each other with no pass through a loader beginning or ending between them."""
    numbers = [evidence.number(index) for index in range(len(evidence.step_start))]

    def at(point: MemoryPoint) -> float:
        index = bisect_left(numbers, point.step)
        return evidence.step_start[index] if index < len(numbers) else math.inf

    ends = sorted(moment for over in evidence.passes for moment in (over.start, over.first, over.end))
    return [
        (before, after)
        for before, after in pairwise(points)
        if after.step > before.step and bisect_right(ends, at(before)) == bisect_right(ends, at(after))
    ]


def _per_step(stretches: list[tuple[MemoryPoint, MemoryPoint]]) -> tuple[float, float, float]:
    """Page faults, seconds of the kernel's CPU, and pages that memory grew by, per step of these stretches."""
    steps = sum(after.step - before.step for before, after in stretches)
    faults = sum((after.faults or 0) - (before.faults or 0) for before, after in stretches)
    seconds = sum((after.system or 0.0) - (before.system or 0.0) for before, after in stretches)
    return faults / steps, seconds / steps, sum(after.rss - before.rss for before, after in stretches) / 4096 / steps
