"""`gc.collect()` is called in the training loop.

## Why it is slow

The collector visits every object of the process, which takes tens of milliseconds with torch loaded. Tensors are freed
without it as soon as nothing refers to them.

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

Always safe for the result. Python still collects objects that refer to each other, from time to time.

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
        """Return a finding for each line of the script that collects garbage."""
        fix = "take it out, or call it once an epoch"
        yield from timed_calls(cls, evidence, "gc_collect", lambda event, often: f"gc.collect() {often}", fix)

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find calls of `gc.collect` within training steps."""
        return code.problems_in_steps(
            _CALLS,
            "all of Python's objects are searched for garbage in every step",
            "remove gc.collect() from the loop, or call it once an epoch",
        )
