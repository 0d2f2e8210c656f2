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

from hasten.doctor.figures import timed_calls
from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Problem
from hasten.evidence import Evidence, Finding

_CALLS = ("gc.collect",)


class GarbageCollected(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding | None]:
        """Return a finding per line of the script."""
        fix = "take it out, or call it once an epoch"
        yield from timed_calls(cls, evidence, "gc_collect", lambda event, often: f"gc.collect() {often}", fix)

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find these calls within training steps."""
        return code.problems_in_steps(
            _CALLS,
            "all of Python's objects are searched for garbage in every step",
            "remove gc.collect() from the loop, or call it once an epoch",
        )
