"""Gradients are exchanged between processes in every backward, although several are added up before a step.

## Why it is slow

DistributedDataParallel sums the gradients of all processes in each backward. The optimizer reads them only at its
step, so every exchange before the last one moves the whole model's gradients over the network for nothing.

## How it is known

The exchanges are counted. Their time is that of the events themselves or their part of the gradient-sync phase; where
neither was measured, the finding is a note.

## Example

```python
model = DistributedDataParallel(model)
for number, (images, labels) in enumerate(loader):
    loss = criterion(model(images), labels) / 4
    loss.backward()
    if (number + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
```

## Use instead

```python
model = DistributedDataParallel(model)
for number, (images, labels) in enumerate(loader):
    last = (number + 1) % 4 == 0
    with contextlib.nullcontext() if last else model.no_sync():
        loss = criterion(model(images), labels) / 4
        loss.backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
```

## When the repair is safe

Always, as long as the forward stands under `no_sync` as well and the last backward of each group does not. Sums are
added in another order: results differ by rounding.

## Source

- PyTorch, DistributedDataParallel.no_sync
- Wolf
- Kuhn, tip 9
"""

from __future__ import annotations

from collections.abc import Iterable

import libcst as cst

from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Problem
from hasten.doctor.source.syntax import last_name, walk
from hasten.evidence import Evidence, Finding, HowKnown, Phase, severity_of
from hasten.evidence.waiting import in_ms, per_step
from hasten.evidence.weigh import LEAST, seconds_of, share_of

_DDP = ("DistributedDataParallel", "DDP")


class AccumulationSyncs(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return at most one finding, for the line with the most of these exchanges."""
        events = sorted(evidence.events_of("ddp_sync"), key=lambda event: -event.count)
        count = sum(event.count for event in events)
        if not count or not evidence.steps:
            return None
        wanted = max([one.steps for one in evidence.optimizers], default=0)
        needless = count / (count + wanted)
        phase = seconds_of(evidence, Phase.SYNC) * needless
        seconds = max(phase, per_step(evidence, events))
        worth = share_of(evidence, seconds)
        if 0 < worth < LEAST:
            return None
        cost = f": {in_ms(seconds)} a step" if worth else ""
        return cls.finding(
            f"gradients are exchanged {count} times for nothing in {evidence.steps} steps, since more are added before "
            f"the optimizer steps{cost}",
            "wrap all but the last backward of an accumulation, with its forward, in `with model.no_sync():`",
            severity_of(worth),
            worth or None,
            HowKnown.MEASURED,
            place=events[0].where,
        )

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Optimizer steps only every n steps, under DDP, without no_sync."""
        if not _ddp(code) or code.script.mentions(
            "no_sync", "require_backward_grad_sync", "accumulate", "set_requires_gradient_sync"
        ):
            return
        for call in code.script.calls:
            by_rest = code.training.steps(call) and _every_nth(code, call)
            if by_rest or (code.training.goes_backward(call) and _in_parts(code, call)):
                yield Problem(
                    call,
                    "every backward sums gradients over all processes, though the optimizer steps only every n",
                    "put the backward passes that only accumulate under `with model.no_sync():`",
                )
                return


def _ddp(code: Code) -> list[cst.Call]:
    return [call for call in code.script.calls if last_name(call.func) in _DDP and call.args]


def _every_nth(code: Code, step: cst.Call) -> bool:
    """Whether an optimizer's step is taken every n rounds of its loop, by a remainder."""
    loop = next(iter(code.training.loops_around(step)), None)
    for above in code.script.ancestors(step):
        if above is loop:
            return False
        if loop is not None and isinstance(above, cst.If):
            for node in walk(above.test):
                if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Modulo):
                    return True
    return False


def _in_parts(code: Code, backward: cst.Call) -> bool:
    """Whether a backward is in a loop of its own inside that of the optimizer's step."""
    loops = code.training.loops_around(backward)
    stepping = [
        code.training.loops_around(call)[0]
        for call in code.script.calls
        if code.training.steps(call) and code.training.loops_around(call)
    ]
    return len(loops) > 1 and loops[0] not in stepping and loops[1] in stepping
