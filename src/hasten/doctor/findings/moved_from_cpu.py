"""Tensors are created on the CPU and moved to the GPU in every step.

## Why it is slow

Each move waits for the GPU and transfers data over the bus. A tensor created on the GPU needs neither.

## How it is known

The measured time of these copies, limited to the time in which the GPU is idle.

## Example

```python
for images, labels in loader:
    optimizer.zero_grad()
    noise = torch.zeros(64, 100).cuda()
    criterion(model(images.cuda(), noise), labels.cuda()).backward()
    optimizer.step()
```

## Use instead

```python
for images, labels in loader:
    optimizer.zero_grad()
    noise = torch.zeros(64, 100, device="cuda")
    criterion(model(images.cuda(), noise), labels.cuda()).backward()
    optimizer.step()
```

## When the repair is safe

Always for constants. Random numbers drawn on the GPU differ from those of the CPU's generator, so `hasten fix` leaves
such calls unchanged.

## Source

- Lin, create tensors directly on the target device
- PyTorch performance tuning guide
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import libcst as cst

from hasten.doctor.figures import group_by_line, wait_finding
from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Edit, Problem
from hasten.doctor.source.syntax import argument, device_of, has_star_arguments, receiver, with_keyword
from hasten.evidence import Evidence, Finding
from hasten.evidence.waiting import in_ms, per_step

# Functions by what changes when they run on the GPU: nothing, rounding, the random numbers.
_EXACT = frozenset([
    "torch.zeros", "torch.ones", "torch.full", "torch.empty", "torch.arange", "torch.eye", "torch.tensor",
])  # fmt: skip
_ROUNDED = frozenset(["torch.linspace", "torch.logspace"])
_RANDOM = frozenset(["torch.rand", "torch.randn", "torch.randint", "torch.randperm", "torch.normal"])


class MovedFromCpu(Rule):
    gpu_only = True

    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding | None]:
        """Return a finding for each line of the script that moves a new tensor to the GPU."""
        for events in group_by_line(evidence.events_of("moved")):
            count, seconds = sum(event.count for event in events), per_step(evidence, events)
            yield from wait_finding(
                cls,
                evidence,
                events,
                f"tensors are made on the CPU and moved to the GPU, {count} times in {evidence.steps} steps, "
                f"{in_ms(seconds)} a step",
                "make them on the GPU: pass `device=` to what builds them, or keep them as a buffer of the module",
            )

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find tensors that are created and moved in one expression, in code that runs repeatedly."""
        for call in code.script.calls:
            device, creation = device_of(call), receiver(call)
            if device is None or not isinstance(creation, cst.Call) or not code.repeats(call):
                continue
            full = code.script.qualified(creation.func)
            if (
                full not in _EXACT | _RANDOM | _ROUNDED
                or argument(creation, "device") is not None
                or has_star_arguments(creation)
            ):
                continue
            unfixed_reason = ""
            if full in _RANDOM:
                unfixed_reason = "on the device it would draw other random numbers"
            elif full in _ROUNDED:
                unfixed_reason = "on the device it would round otherwise"
            elif argument(creation, "pin_memory") is not None or argument(creation, "out") is not None:
                unfixed_reason = "it is pinned, or has a place already"
            target = code.text(device)
            yield Problem(
                call,
                f"`{code.text(creation)}` is made on the CPU and then copied",
                f"make it where it is needed: device={target}",
                () if unfixed_reason else (Edit(call, _made_there(device)),),
                unfixed_reason,
            )


def _made_there(device: cst.BaseExpression) -> Any:
    """Return the change of `torch.zeros(3).cuda()` into `torch.zeros(3, device="cuda")`."""

    def change(call: Any) -> cst.CSTNode:
        made = with_keyword(call.func.value, "device", device)
        return made.with_changes(lpar=[*call.lpar, *made.lpar], rpar=[*made.rpar, *call.rpar])

    return change
