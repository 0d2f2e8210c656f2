"""Logs and files are written while the step waits.

## Why it is slow

Writing to a file, a network logger or an image runs in the thread that trains, and the next step begins only after it.

## How it is known

The measured time of the writes.

## Example

```python
for step, (images, labels) in enumerate(loader):
    loss = train(images, labels)
    writer.add_histogram("weights", model.fc.weight, step)
```

## Use instead

```python
for step, (images, labels) in enumerate(loader):
    loss = train(images, labels)
    if step % 100 == 0:
        writer.add_histogram("weights", model.fc.weight, step)
```

## When the repair is safe

Always safe for the training; the log has fewer points.

## Source

- Falcon
- TraceML
"""

from __future__ import annotations

from collections.abc import Iterator

from hasten.doctor.figures import timed_calls
from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding


class BlockingLog(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding | None]:
        """Return a finding for each line of the script that logs."""
        yield from timed_calls(
            cls,
            evidence,
            "log",
            lambda event, often: f"a log is written{f' by {event.detail}' if event.detail else ''} {often}",
            "write every 50 to 100 steps, without flushing, or from a thread",
        )
