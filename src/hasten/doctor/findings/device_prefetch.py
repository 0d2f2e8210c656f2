"""Each step begins with a copy of its batch, during which the GPU computes nothing.

## Why it is slow

The copy runs on the same CUDA stream as the computation, so the GPU computes nothing during the copy. On a separate
stream it can run in parallel with the previous step.

## How it is known

The time of the copy on the GPU's clock (CUDA events).

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

Always: results are bit-identical. The GPU's memory holds one more batch. The technique skips loaders without workers,
since their samples would be made early too.

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
        """Return a finding if copies of pinned batches take 1 % of the step or more.

        A loader without workers has no batches ready that the technique could copy early.
        """
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
