"""Memory use grows with every step.

## Why it is slow

The run ends when memory is exhausted, often after hours. Before that, a CPU training begins to swap.

## How it is known

hasten fits a straight line through the memory use at many steps after the warm-up. It reports growth that the line
explains, that does not slow down, and that would fill the memory of the machine or the GPU within 100 000 steps.

## Example

```python
for images, labels in loader:
    outputs = model(images)
    history.append(outputs)
```

## Use instead

```python
for images, labels in loader:
    outputs = model(images)
    history.append(outputs.argmax(1).cpu())
```

## When the repair is safe

Safe where the part that is no longer kept is not used later.

## Source

- PyTorch FAQ, my model reports out of memory
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from hasten.doctor.figures import GRAPHS, kept_losses
from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, MemoryPoint, Severity

_POINTS = 6  # least points that a line is fitted through
_SPAN = 100  # least steps that the line must cover: heaps of several threads take dozens of steps to settle
_GROWN = 32 << 20  # bytes: smaller growth may be the allocator's
_STEADY = 0.9  # share of the variance that a straight line must explain
_FAR = 100_000  # steps within which growth must fill the memory to be reported
_SOON = 20_000  # and to be reported as HIGH


class MemoryCreep(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding]:
        """Return at most one finding: for the GPU's memory, else for the process's memory."""
        points = _settled(evidence)
        gpu_limit = next((gpu.memory_total for gpu in evidence.used.gpus), 0) or 80 << 30  # 80 GiB if unknown
        gpu = [(point.step, point.gpu) for point in points if point.gpu is not None]
        series = [
            ("the GPU", [step for step, _ in gpu], [used for _, used in gpu], gpu_limit),
            ("the process", [p.step for p in points], [p.rss for p in points], evidence.machine.memory_bytes),
        ]
        # Graphs that are kept explain growth, so it need not be watched for long.
        span = 1 if _graphs_kept(evidence) else _SPAN
        for owner, steps, used, limit in series:
            growth = _growth(steps, used, limit, span)
            if growth is None:
                continue
            # Graphs that are kept tell the line that causes the growth.
            cause = next((e for e in evidence.events_of("retained_graph") if e.count >= GRAPHS and e.where), None)
            yield cls.finding(
                f"memory of {owner} grows by {growth.a_step / 2**20:.2g} MiB a step, {growth.grown / 2**20:.0f} MiB in "
                f"{steps[-1] - steps[0]} steps, and fills {limit / 2**30:.0f} GiB by step {growth.full_at:.0f}",
                "keep no tensors from step to step: append `loss.item()` or `loss.detach()` in place of the loss, and "
                "clear lists of outputs",
                Severity.HIGH if growth.full_at <= _SOON else Severity.MEDIUM,
                place=cause.where if cause else "",
                details=(f"it held {growth.last / 2**30:.2f} GiB at step {steps[-1]}",),
            )
            return


@dataclass(frozen=True)
class _Growth:
    """A steady growth of memory.

    Attributes:
        a_step: Bytes per step.
        grown: Bytes over the whole series.
        last: Bytes in use at the end.
        full_at: Number of the step at which the memory will be full.
    """

    a_step: float
    grown: float
    last: int
    full_at: float


def _growth(steps: list[int], used: list[int], limit: int, span: int) -> _Growth | None:
    """Return the growth of a series over at least `span` steps.

    None unless the series rises along a straight line, does not slow down, and would fill `limit` bytes within `_FAR`
    steps.
    """
    if len(steps) < _POINTS or steps[-1] - steps[0] < span or used[-1] - used[0] < _GROWN:
        return None
    if len(set(used)) < len(used) // 2:  # mostly repeated values: a few jumps, not a line
        return None
    slope = statistics.linear_regression(steps, used).slope
    # A cache that fills slows down towards the end; a leak grows in the last third as it did on average.
    third = len(steps) // 3
    late = (used[-1] - used[-1 - third]) / max(1, steps[-1] - steps[-1 - third])
    early = (used[third] - used[0]) / max(1, steps[third] - steps[0])
    straight = statistics.correlation(steps, used) ** 2 >= _STEADY
    if slope <= 0 or not straight or early <= 0 or late < 0.5 * slope:
        return None
    full_at = steps[-1] + max(0, limit - used[-1]) / slope
    return _Growth(slope, used[-1] - used[0], used[-1], full_at) if full_at <= _FAR else None


def _settled(evidence: Evidence) -> list[MemoryPoint]:
    """Return the points at which memory should no longer grow: after the warm-up and after the first epoch.

    A dataset that keeps its samples, or a file that is mapped into memory, grows during the first epoch and stops. The
    first epoch counts if that cannot be the reason: if graphs are kept, or if workers read the data.
    """
    points = [point for point in evidence.memory if point.step >= 10]
    loader = evidence.train_loader
    first = next((data_pass for data_pass in evidence.passes if data_pass.trained and data_pass.batches), None)
    if loader is None or loader.num_workers or _graphs_kept(evidence) or first is None:
        return points[len(points) // 4 :]
    return [point for point in points if point.step >= first.batches]


def _graphs_kept(evidence: Evidence) -> bool:
    """Return whether losses are kept with their graphs, as `retained_graph` reports."""
    return any(kept_losses(event.count, event.detail, event.steps) for event in evidence.events_of("retained_graph"))
