"""`gc.collect()` is called in the loop.

## Why it is slow

It walks all objects of the process, tens of milliseconds with torch loaded. Tensors are freed without it as soon as
nothing refers to them.

## How it is known

The measured time of the calls.

## Example

```python
for images, labels in loader:
    optimizer.zero_grad()
    criterion(model(images), labels).backward()
    optimizer.step()
    gc.collect()
```

## Use instead

```python
for images, labels in loader:
    optimizer.zero_grad()
    criterion(model(images), labels).backward()
    optimizer.step()
```

## When the repair is safe

Always for the result. Objects that refer to each other are still collected by Python itself, now and then.

## Source

- Python, gc
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Problem
from hasten.doctor.source.syncs import calls_in_steps
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.waiting import in_ms, per_step
from hasten.evidence.weigh import share_of, timed

_CALLS = ("gc.collect",)


class GarbageCollected(Rule):
    """`gc.collect()` is called in the loop."""

    name = "garbage_collected"

    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding]:
        """One a line."""
        for event in evidence.events_of("gc_collect"):
            spent = per_step(evidence, [event])
            finding = timed(
                cls.name,
                f"gc.collect() {event.count} times in {evidence.steps} steps, {in_ms(spent)} a step",
                "take it out, or call it once an epoch",
                share_of(evidence, spent),
                HowKnown.MEASURED,
                place=event.where,
                sources=cls.sources,
            )
            if finding is not None:
                yield finding

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Those calls, in steps."""
        for call in calls_in_steps(code, _CALLS):
            yield Problem(
                call,
                "all of Python's objects are searched for garbage in every step",
                "remove gc.collect() from the loop, or call it once an epoch",
            )
