"""DistributedDataParallel exchanges gradients in every backward although several are accumulated before a step.

## Why it is slow

DistributedDataParallel sums the gradients of all processes in each backward. The optimizer reads them only at its
step, so every exchange except the last one moves the whole model's gradients over the network for nothing.

## How it is known

hasten counts the exchanges. Their cost is the time measured for the exchanges themselves, or their share of the
gradient-sync phase, whichever is larger. Where neither was measured, the finding is a note.

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

Always, as long as the forward also runs under `no_sync` and the last backward of each accumulation does not. Sums are
added in another order, so results differ by rounding.

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
        """Return at most one finding, placed at the line with the most needless exchanges."""
        events = sorted(evidence.events_of("ddp_sync"), key=lambda event: -event.count)
        count = sum(event.count for event in events)
        if not count or not evidence.steps:
            return None
        # Each optimizer step needs one exchange; the events count only those that no step followed.
        necessary = max([optimizer.steps for optimizer in evidence.optimizers], default=0)
        needless = count / (count + necessary)
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
        """Find optimizer steps taken every n batches under DDP, in files without `no_sync` or an equivalent."""
        if not _ddp(code) or code.script.mentions(
            "no_sync", "require_backward_grad_sync", "accumulate", "set_requires_gradient_sync"
        ):
            return
        for call in code.script.calls:
            every_nth = code.training.is_optimizer_step(call) and _every_nth(code, call)
            if every_nth or (code.training.goes_backward(call) and _in_parts(code, call)):
                yield Problem(
                    call,
                    "every backward sums gradients over all processes, though the optimizer steps only every n",
                    "put the backward passes that only accumulate under `with model.no_sync():`",
                )
                return


def _ddp(code: Code) -> list[cst.Call]:
    """Return the calls that wrap a model in DistributedDataParallel."""
    return [call for call in code.script.calls if last_name(call.func) in _DDP and call.args]


def _every_nth(code: Code, step: cst.Call) -> bool:
    """Return whether an `if` with a modulo guards an optimizer step in its loop: `if (i + 1) % 4 == 0`."""
    loop = next(iter(code.training.loops_around(step)), None)
    for ancestor in code.script.ancestors(step):
        if ancestor is loop:
            return False
        if loop is not None and isinstance(ancestor, cst.If):
            for node in walk(ancestor.test):
                if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Modulo):
                    return True
    return False


def _in_parts(code: Code, backward: cst.Call) -> bool:
    """Return whether a backward runs in an inner loop, over parts of a batch, and the optimizer in the outer one."""
    loops = code.training.loops_around(backward)
    stepping = [
        code.training.loops_around(call)[0]
        for call in code.script.calls
        if code.training.is_optimizer_step(call) and code.training.loops_around(call)
    ]
    return len(loops) > 1 and loops[0] not in stepping and loops[1] in stepping
