"""The training waits while checkpoints are written.

## Why it is slow

`torch.save` copies every tensor to the CPU, pickles it and waits for the file, all in the thread that trains.

## How it is known

The measured time of all saves, within steps and between them, as a share of the time of steps and saves together.

## Example

```python
if step % 100 == 0:
    torch.save(model.state_dict(), path)
```

## Use instead

```python
if step % 100 == 0:
    if saving is not None:
        saving.result()
    saving = torch.distributed.checkpoint.async_save({"model": model.state_dict()}, checkpoint_id=folder)
```

## When the repair is safe

Safe if the last save is waited for before the next one begins and before the script ends. Saving less often is always
safe.

## Source

- PyTorch, torch.distributed.checkpoint.async_save
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown, Phase
from hasten.evidence.waiting import in_ms, per_step
from hasten.evidence.weigh import seconds_of, steady_seconds


class BlockingCheckpoint(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if saving takes 1 % of the time or more."""
        events = evidence.events_of("save")
        saving = max(per_step(evidence, events), seconds_of(evidence, Phase.CHECKPOINT))
        step = steady_seconds(evidence)
        if not step or not saving:
            return None
        count = sum(event.count for event in events)
        frequency = f", {count} times in {evidence.steps} steps" if count else ""
        return cls.timed(
            f"the training stands still while checkpoints are written{frequency}: {in_ms(saving)} for each step of "
            f"{in_ms(step)}",
            "save less often, or beside the training (torch.distributed.checkpoint.async_save; hasten's "
            "Trainer does so)",
            saving / (step + saving),
            HowKnown.MEASURED,
            place=events[0].where if events else "",
        )
