"""Convolutions read images channel by channel, although channels last is faster on this machine.

## Why it is slow

Convolution kernels want a pixel's channels next to each other. In torch's default memory format they are far apart,
and libraries rearrange them in each call or use a slower kernel.

## How it is known

hasten switches channels last on and off during the run, in blocks of steps. Where the run was too short for that, it
times single layers after the run. On a CPU the layers only represent a whole step that was not timed, together with
the copies between layers of both memory formats, so the worth is an estimate there, and below 5 % nothing is reported.

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

Results differ by rounding. Code that calls `.view()` on activations must call `.reshape()` instead.

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
        """Return a finding if layers, or the whole step, were measured faster with channels last."""
        tried = evidence.measured_for(cls.name)
        sure = is_sure(evidence, cls.name)
        if not (tried or sure) or isinstance(ChannelsLast.settings(evidence), Refusal):
            return None
        worth, gpu = saved(evidence, tried), on_gpu(evidence)
        # On a CPU, layers timed one by one predict less than 5 % of a step too poorly.
        if not gpu and worth < CERTAIN and not sure:
            return None
        how_known = HowKnown.MEASURED if gpu else HowKnown.ESTIMATED
        what = "convolutions read images channel by channel"
        if tried:
            saving = f"channels last they take {percent(gain_of(tried))} less time"
            what = f"{tried[0].what.partition(':')[0]} and the like read images channel by channel; {saving}"
        return cls.switched(
            evidence,
            what,
            "model.to(memory_format=torch.channels_last), and the same of the images of each batch",
            worth,
            how_known,
            setting="true",
        )

    @classmethod
    def may_help(cls, evidence: Evidence) -> bool:
        """Return whether forward and backward take 5 % of the step or more and no layer reads channels last yet."""
        applied = any(layer.channels_last for layer in evidence.layers)
        return not applied and share_of(evidence, seconds_of(evidence, *COMPUTE)) >= CERTAIN
