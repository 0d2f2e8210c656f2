"""`find_unused_parameters=True` is set although every parameter is used.

## Why it is slow

DistributedDataParallel then traverses the whole graph after each forward.

## How it is known

In a run: no parameter was without a gradient.

## Example

```python
model = DistributedDataParallel(model, find_unused_parameters=True)
```

## Use instead

```python
model = DistributedDataParallel(model)
```

## When the repair is safe

Safe where every parameter gets a gradient in every step, on every process; otherwise the backward raises an error that
says so. `static_graph=True` is for a graph that does not change between steps.

## Source

- PyTorch, DistributedDataParallel
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Problem
from hasten.doctor.source.syntax import argument, is_name, last_name
from hasten.evidence import Evidence, Finding, HowKnown, severity_of
from hasten.evidence.waiting import per_step
from hasten.evidence.weigh import share_of

_WRAPS = re.compile(r"^(DDP|DistributedDataParallel)|Strategy$")


class UnusedParameters(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding]:
        """Return a finding for each DistributedDataParallel that searched and found no unused parameter."""
        for event in evidence.events_of("ddp_unused"):
            if event.detail != "none unused" or evidence.flags.missing_gradients:
                continue
            worth = share_of(evidence, per_step(evidence, [event]))
            yield cls.finding(
                f"DistributedDataParallel looks for unused parameters in each of {evidence.steps} steps, and "
                "there were none",
                "leave out find_unused_parameters=True",
                severity_of(worth),
                worth if worth >= 0.01 else None,
                HowKnown.MEASURED,
                place=event.where,
            )

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find `find_unused_parameters=True`."""
        for call in code.script.calls:
            if not _WRAPS.search(last_name(call.func)):
                continue
            if is_name(argument(call, "find_unused_parameters"), "True"):
                yield Problem(
                    call,
                    "DDP looks for unused parameters in every step",
                    "remove find_unused_parameters=True if every parameter gets a gradient, or use static_graph=True",
                )
