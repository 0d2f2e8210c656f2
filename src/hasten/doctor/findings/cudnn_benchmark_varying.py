"""`cudnn.benchmark` is on although input sizes keep changing.

## Why it is slow

cuDNN times its kernels again for every new size, which takes many times as long as one step.

## How it is known

Reported on a GPU, for models with convolutions that got at least four input sizes. The cost is the time that the slow
steps, those over three times as long as the median, took beyond the median.

## Example

```python
torch.backends.cudnn.benchmark = True
for images in loader:  # each batch of another height and width
    model(images)
```

## Use instead

```python
torch.backends.cudnn.benchmark = False
for images in loader:
    model(images)
```

## When the repair is safe

Always; results differ by rounding. Padding or resizing batches to a few sizes keeps the fast kernels as well.

## Source

- Lin, tip 15
- Kuhn, tip 6
"""

from __future__ import annotations

from hasten.doctor.figures import lost_in_outliers
from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown


class CudnnBenchmarkVarying(Rule):
    gpu_only = True

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding for convolutions with varying sizes; its cost is estimated as for `recompilations`."""
        if not evidence.flags.cudnn_benchmark or evidence.inputs is None:
            return None
        convolutions = any(layer.startswith("Conv") for model in evidence.models for layer in model.layers)
        sizes = len(evidence.inputs.shapes)
        if not convolutions or sizes < 4:
            return None
        return cls.timed(
            f"cudnn.benchmark measures kernels for every new size, and {sizes} sizes came in "
            f"{evidence.inputs.batches} batches",
            "set torch.backends.cudnn.benchmark = False, or bring the batches to a few sizes",
            lost_in_outliers(evidence),
            HowKnown.ESTIMATED,
        )
