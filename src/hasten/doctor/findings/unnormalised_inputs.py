"""The mean or spread of the inputs is far from 0 and 1.

## Why it is slow

This costs no time. The gradients of the first layer are then scaled by the same factor, and the training needs a
smaller learning rate or more steps.

## How it is known

The statistics of the first batches. Only floating-point inputs count: integers are tokens, or images that the script
may normalise later.

## Example

```python
images = torch.from_numpy(pixels).float()
```

## Use instead

```python
images = (torch.from_numpy(pixels).float() / 255 - mean) / std
```

## When the repair is safe

Safe for a new training. A model that was trained on unnormalised inputs must continue with those.

## Source

- LeCun, Bottou, Orr, Müller, Efficient BackProp, 1998
- Kuhn
"""

from __future__ import annotations

import math

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, Severity

_NORMS = ("BatchNorm", "LayerNorm", "InstanceNorm", "GroupNorm", "LazyBatchNorm", "RMSNorm", "Embedding")


class UnnormalisedInputs(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if floating-point inputs are far from normal and the first layer does not normalise them."""
        inputs = evidence.inputs
        if inputs is None or inputs.mean is None or inputs.std is None or "float" not in inputs.dtype:
            return None
        if evidence.layers and evidence.layers[0].kind.startswith(_NORMS):
            return None  # the model normalises them itself
        problem = _why_not_normal(inputs.mean, inputs.std, inputs.last_mean, inputs.last_std)
        if not problem:
            return None
        value_range, pixels = "", False
        if inputs.low is not None and inputs.high is not None:
            value_range = f", values from {inputs.low:g} to {inputs.high:g}"
            # Values from 0 to 255 are most likely images that were not divided by 255.
            pixels = inputs.low >= 0 and 100 < inputs.high <= 255
        return cls.finding(
            f"{problem}{value_range}",
            "divide the pixels by 255 (ToTensor does), then subtract the mean and divide by the standard deviation"
            if pixels
            else "subtract each feature's mean over the training set and divide by its standard deviation",
            Severity.NOTE,
            place=evidence.train_loader.where if evidence.train_loader else "",
            details=("unless the script normalises them behind the loader",),
        )


def _why_not_normal(mean: float, std: float, feature_mean: float | None, feature_std: float | None) -> str:
    """Return what is unusual about the inputs, over all values or over a single feature; "" if nothing is."""
    if not all(map(math.isfinite, (mean, std))):
        return ""
    if abs(mean) > 5 or std > 10:
        return f"inputs have mean {mean:.3g} and standard deviation {std:.3g}"
    if 0 < std < 0.01:
        return f"inputs hardly vary: standard deviation {std:.3g}"
    if (feature_mean or 0) > 5 or (feature_std or 0) > 10:
        return f"a feature of the inputs has mean {feature_mean or 0:.3g} or standard deviation {feature_std or 0:.3g}"
    return ""
