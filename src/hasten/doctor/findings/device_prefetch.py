"""The GPU's step begins with the copy of its batch.

## Why it is slow

The copy runs on the same stream as the computation, so the GPU computes nothing meanwhile. On a stream of its own it
runs beside the step before it.

## How it is known

The copy's time on the GPU's own clock.

## Example

```python
for images, labels in loader:
    images = images.to("cuda", non_blocking=True)
    train(images, labels)
```

## Use instead

```bash
hasten run train.py  # with the line `device_prefetch = true` in hasten.toml
```

## When the repair is safe

Always: results stay the same to the bit. One more batch is held in the GPU's memory. A loader without workers is left
alone, since its samples would be made early too.

## Source

- NVIDIA data prefetcher (apex imagenet example)
- Lightning #4803
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown, Phase
from hasten.evidence.waiting import in_ms
from hasten.evidence.weigh import seconds_of, share_of
from hasten.techniques.transfer.device_prefetch import DevicePrefetch


class NoDevicePrefetch(Rule):
    cure = DevicePrefetch

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return at most one finding; a loader without workers has none for the technique to take batches from."""
        loader = evidence.train_loader
        if loader is None or not (loader.pin_memory and loader.num_workers) or not evidence.device_clock:
            return None
        if DevicePrefetch.refuse_without_gpu(evidence):
            return None
        copying = seconds_of(evidence, Phase.TRANSFER)
        return cls.timed(
            f"each step begins with {in_ms(copying)} in which the GPU only copies its batch",
            "copy the next batch on a stream of its own while this one is computed: the technique device_prefetch",
            share_of(evidence, copying),
            HowKnown.ESTIMATED,
            place=loader.where,
            setting="true",
        )
