"""float32 matrix products run without TF32.

## Why it is slow

GPUs since Ampere multiply float32 matrices several times faster in TF32. Convolutions use TF32 by default; matrix
products do not.

## How it is known

hasten switches TF32 on and off during the run, or times single layers after it. Where neither was done, the worth is
half of the time of the matrix products.

## Example

```python
model = Transformer().cuda()
```

## Use instead

```python
torch.set_float32_matmul_precision("high")
model = Transformer().cuda()
```

## When the repair is safe

Products keep 10 bits of the mantissa instead of 23; sums stay in float32. Not safe for solvers that need the precision
of float32.

## Source

- NVIDIA Ampere tuning guide
- torch.set_float32_matmul_precision
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.figures import percent
from hasten.evidence.weigh import products, saved, share_of
from hasten.techniques.base import Refusal
from hasten.techniques.compute.matmul_precision import MatmulPrecision


class Tf32Off(Rule):
    cure = MatmulPrecision
    tried = "high"
    gpu_only = True

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding for models that compute in float32. Convolutions do not count: they use TF32 already."""
        if any(model.autocast or model.dtype != "float32" for model in evidence.models):
            return None
        if isinstance(MatmulPrecision.settings(evidence), Refusal):
            return None
        tried = evidence.measured_for(cls.name)
        share = share_of(evidence, products(evidence, convolutions=False))
        worth, how_known = (saved(evidence, tried), HowKnown.MEASURED) if tried else (share / 2, HowKnown.ESTIMATED)
        of_step = f", {percent(share)} of the step," if share else ""
        return cls.switched(
            evidence,
            f"float32 matrix products{of_step} run without TF32 on {' '.join(evidence.machine.gpus[:1]) or 'a GPU'}",
            'call torch.set_float32_matmul_precision("high") at the start',
            worth,
            how_known,
            setting="high",
        )
