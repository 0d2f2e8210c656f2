"""A GPU's memory is mostly free while the GPU has little to compute.

## Why it is slow

A small batch leaves most of a GPU's cores idle; a bigger batch takes hardly longer.

## How it is known

The peak memory that torch allocated and how busy the GPU was. Reported only if the GPU is idle for lack of work, not
because it waits for data.

## Example

```python
loader = DataLoader(dataset, batch_size=16)
```

## Use instead

```python
loader = DataLoader(dataset, batch_size=128)
```

## When the repair is safe

Another batch size changes how the model learns and needs another learning rate: compare the results, not only the
speed.

## Source

- Kuhn, tip 3
- Lin, maximize GPU memory usage
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, Severity
from hasten.evidence.figures import percent
from hasten.evidence.waiting import data_share, device_busy
from hasten.evidence.weigh import peak_memory


class MemoryUnderused(Rule):
    gpu_only = True

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if less than half of the memory was used and the GPU computes under 70 % of the time."""
        busy, (total, peak) = device_busy(evidence), peak_memory(evidence)
        if not total or not peak or busy is None:
            return None
        used = peak / total
        if used >= 0.5 or busy >= 0.7 or data_share(evidence) >= 0.1:
            return None
        loader = evidence.train_loader
        size = f" at batch size {loader.batch_size}" if loader is not None and loader.batch_size else ""
        return cls.finding(
            f"the GPU computes {percent(busy)} of the time, and {percent(used)} of its "
            f"{total / 2**30:.0f} GiB were ever used{size}",
            "try a bigger batch (with the learning rate that suits it), several runs on the one GPU, or a smaller GPU",
            Severity.NOTE,
            details=("another batch size changes how the model learns: compare the result, not the speed alone",),
        )
