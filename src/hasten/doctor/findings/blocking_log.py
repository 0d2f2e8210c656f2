"""Logs and files are written while the step waits.

## Why it is slow

A write to a file, a network logger or a picture runs in the thread that trains, and the next step begins after it.

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

Always for the training; the log has fewer points.

## Source

- Falcon
- TraceML
"""

from __future__ import annotations

from collections.abc import Iterator

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.waiting import in_ms, per_step
from hasten.evidence.weigh import share_of, timed


class BlockingLog(Rule):
    """Logs and files are written while the step waits."""

    name = "blocking_log"

    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding]:
        """One a line."""
        for event in evidence.events_of("log"):
            spent = per_step(evidence, [event])
            by = f" by {event.detail}" if event.detail else ""
            finding = timed(
                cls.name,
                f"a log is written{by} {event.count} times in {evidence.steps} steps, {in_ms(spent)} a step",
                "write every 50 to 100 steps, without flushing, or from a thread",
                share_of(evidence, spent),
                HowKnown.MEASURED,
                place=event.where,
                sources=cls.sources,
            )
            if finding is not None:
                yield finding
