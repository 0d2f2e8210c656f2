"""`torch.cuda.synchronize()` is called in the training loop.

## Why it is slow

The CPU waits until the GPU has finished all work, and launches nothing during that wait.

## How it is known

The measured waits, limited to the time in which the GPU is idle.

## Example

```python
for images, labels in loader:
    optimizer.zero_grad()
    criterion(model(images), labels).backward()
    optimizer.step()
    torch.cuda.synchronize()
```

## Use instead

```python
for images, labels in loader:
    optimizer.zero_grad()
    criterion(model(images), labels).backward()
    optimizer.step()
```

## When the repair is safe

Always safe for the result: work on one stream keeps its order. To time steps, record a `torch.cuda.Event` and read it
some steps later.

## Source

- PyTorch performance tuning guide, avoid unnecessary CPU-GPU synchronization
- PyTorch, CUDA semantics, asynchronous execution
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hasten.doctor.figures import group_by_line, wait_finding
from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Problem
from hasten.evidence import Evidence, Finding
from hasten.evidence.waiting import in_ms, per_step

_CALLS = ("torch.cuda.synchronize", "torch.mps.synchronize", "torch.xpu.synchronize", "torch.accelerator.synchronize")


class SynchronizeInLoop(Rule):
    gpu_only = True

    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding | None]:
        """Return a finding for each line of the script that synchronises."""
        for events in group_by_line(evidence.events_of("synchronize")):
            count = sum(event.count for event in events)
            yield from wait_finding(
                cls,
                evidence,
                events,
                f"torch.cuda.synchronize() {count} times in {evidence.steps} steps, "
                f"{in_ms(per_step(evidence, events))} a step in which the CPU starts no work",
                "take it out; to time the step, read CUDA events some steps later",
            )

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find calls that synchronise the device within training steps."""
        return code.problems_in_steps(
            _CALLS,
            "Python waits for the whole device in every step",
            "remove the call, or time with torch.cuda.Event and read the times every n steps",
        )
