"""Convolutions read images channel by channel and are faster here with channels last.

## Why it is slow

Convolution kernels want a pixel's channels side by side. In torch's default layout they lie far apart, and libraries
rearrange them in each call or take a slower kernel.

## How it is known

Switched on and off in the run itself, in blocks of steps. Where the run was too short for that, layer by layer: on a
CPU that stands for a whole step that was not tried, with the copies between layers of both kinds, so there it is an
estimate, and below 5 % nothing is said.

## Example

```python
model = ResNet().to(device)
for images, labels in loader:
    loss = criterion(model(images.to(device)), labels.to(device))
```

## Use instead

```python
model = ResNet().to(device, memory_format=torch.channels_last)
for images, labels in loader:
    images = images.to(device, memory_format=torch.channels_last)
    loss = criterion(model(images), labels.to(device))
```

## When the repair is safe

Results differ by rounding. Code that takes `.view()` of activations must use `.reshape()`.

## Source

- Lin, tip 16
- PyTorch performance tuning guide
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.figures import percent
from hasten.evidence.weigh import CERTAIN, COMPUTE, gain_of, is_sure, on_gpu, saved, seconds_of, share_of
from hasten.techniques.base import Refusal
from hasten.techniques.compute.channels_last import ChannelsLast


class ChannelsFirst(Rule):
    cure = ChannelsLast
    tried = True

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return at most one finding."""
        tried = evidence.measured_for(cls.name)
        sure = is_sure(evidence, cls.name)
        if not (tried or sure) or isinstance(ChannelsLast.settings(evidence), Refusal):
            return None
        worth, gpu = saved(evidence, tried), on_gpu(evidence)
        if not gpu and worth < CERTAIN and not sure:
            return None
        claim = HowKnown.MEASURED if gpu else HowKnown.ESTIMATED
        what = "convolutions read images channel by channel"
        if tried:
            less = f"channels last they take {percent(gain_of(tried))} less time"
            what = f"{tried[0].what.partition(':')[0]} and the like read images channel by channel; {less}"
        return cls.switched(
            evidence,
            what,
            "model.to(memory_format=torch.channels_last), and the same of the images of each batch",
            worth,
            claim,
            setting="true",
        )

    @classmethod
    def may_help(cls, evidence: Evidence) -> bool:
        """Return whether forward and backward take long enough, and no convolution reads its images so already."""
        there = any(layer.channels_last for layer in evidence.layers)
        return not there and share_of(evidence, seconds_of(evidence, *COMPUTE)) >= CERTAIN
