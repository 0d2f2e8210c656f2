"""cuDNN chooses convolution kernels by heuristics although input sizes stay the same.

## Why it is slow

cuDNN has several kernels for each convolution. With `benchmark` it times them once for each size and keeps the
fastest.

## How it is known

hasten switches the benchmark on and off during the run, in blocks of steps. Where that was not done, it times single
layers after the run.

## Example

```python
model = ResNet().cuda()
```

## Use instead

```python
torch.backends.cudnn.benchmark = True
model = ResNet().cuda()
```

## When the repair is safe

Results differ by rounding, also from run to run. Not safe where the script asks for deterministic algorithms.

## Source

- Lin, tip 15
- Kuhn, tip 6
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.weigh import is_sure, saved
from hasten.techniques.base import Refusal
from hasten.techniques.compute.cudnn_benchmark import CudnnBenchmark


class CudnnBenchmarkOff(Rule):
    cure = CudnnBenchmark
    tried = True

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if the benchmark was measured faster and batches have at most two sizes."""
        tried = evidence.measured_for(cls.name)
        sizes = len(evidence.inputs.shapes) if evidence.inputs else 0
        # The second size may be that of the last, smaller batch of an epoch.
        if sizes > 2 or isinstance(CudnnBenchmark.settings(evidence), Refusal):
            return None
        if not tried and not is_sure(evidence, cls.name):
            return None
        return cls.switched(
            evidence,
            "cuDNN picks the kernels of its convolutions by rule of thumb although their sizes stay the same",
            "set torch.backends.cudnn.benchmark = True at the start",
            saved(evidence, tried),
            HowKnown.MEASURED,
            setting="true",
        )

    @classmethod
    def may_help(cls, evidence: Evidence) -> bool:
        """Return whether input sizes stay the same, but for the last batch of an epoch."""
        return len(evidence.inputs.shapes) <= 2 if evidence.inputs else True
