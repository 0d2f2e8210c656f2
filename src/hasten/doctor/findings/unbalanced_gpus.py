"""The first GPU does more work, or holds more memory, than the others.

## Why it is slow

The step waits for the busiest GPU, and the GPU with the most memory in use limits the batch size.

## How it is known

The measured utilisation and memory of the GPUs.

## Example

```python
outputs = nn.DataParallel(model)(images)
loss = criterion(outputs, labels)
```

## Use instead

```python
model = DistributedDataParallel(model)
loss = criterion(model(images), labels)
```

## When the repair is safe

As for `data_parallel`. Checkpoints loaded in several processes need `map_location`.

## Source

- Wolf, balanced load on a multi-GPU machine
"""

from __future__ import annotations

import statistics

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown, Severity, severity_of
from hasten.evidence.figures import percent
from hasten.evidence.waiting import mean_during


class UnbalancedGpus(Rule):
    gpu_only = True

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if the first GPU is clearly busier than the others or holds 1.5 times their memory."""
        # A GPU with less than 2 % of its memory in use takes no part in the training.
        gpus = [gpu for gpu in evidence.used.gpus if gpu.memory and max(gpu.memory) > gpu.memory_total / 50]
        busy = [mean_during(evidence, gpu.busy) or 0.0 for gpu in gpus]
        if len(gpus) < 2 or not busy[0]:
            return None
        others_busy = statistics.fmean(busy[1:])
        worth = 1 - statistics.fmean(busy) / max(busy) if busy[0] == max(busy) else 0.0
        first_memory, others_memory = max(gpus[0].memory), statistics.median(max(gpu.memory) for gpu in gpus[1:])
        uneven = busy[0] - others_busy >= 0.15 and worth >= 0.05
        fuller_first = (
            others_memory > 0 and first_memory >= 1.5 * others_memory and first_memory - others_memory >= 1 << 30
        )
        if not uneven and not fuller_first:
            return None
        return cls.finding(
            f"the first GPU is {percent(busy[0])} busy and holds {first_memory / 2**30:.1f} GiB, the others "
            f"{percent(others_busy)} and {others_memory / 2**30:.1f} GiB",
            "compute the loss on each GPU (inside the module's forward), keep outputs where they are made, and load "
            "checkpoints with map_location; DistributedDataParallel balances by itself",
            severity_of(worth) if uneven else Severity.NOTE,
            worth if uneven else None,
            HowKnown.ESTIMATED,
        )
