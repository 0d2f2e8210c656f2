"""Pointwise operators that run one kernel each take much of the step.

## Why it is slow

Each operator reads its input from memory and writes its output back. Fused, the numbers stay in registers from one
operation to the next.

## How it is known

The time of the pointwise operators in the sampled steps. The worth assumes that fusion saves half of it, which is an
estimate; `hasten tune` measures it.

## Example

```python
model = Transformer()
```

## Use instead

```python
model = torch.compile(Transformer())
```

## When the repair is safe

Results differ by rounding. Compiling takes seconds to minutes at the first step, and needs a C++ compiler on a CPU.

## Source

- torch.compile tutorial
- Lin, tip 10
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.figures import percent
from hasten.evidence.weigh import COMPUTE, seconds_of, share_of
from hasten.techniques.base import Refusal
from hasten.techniques.compute.compile import Compile

_POINTWISE = 0.25  # least share of the step in pointwise operators
_CHAIN = 12  # least number of them per step, forward and backward


class UnfusedPointwise(Rule):
    cure = Compile

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if a quarter of the step or more is spent in a dozen or more pointwise operators."""
        sampled = evidence.sampled
        if sampled is None or sampled.pointwise_calls < _CHAIN or isinstance(Compile.settings(evidence), Refusal):
            return None
        # The profiler lengthens a step, so limit its times to the forward and backward of ordinary steps.
        share = share_of(evidence, min(sampled.pointwise_seconds, seconds_of(evidence, *COMPUTE)))
        if share < _POINTWISE:
            return None
        calls = sampled.pointwise_calls
        return cls.timed(
            f"{calls:.0f} pointwise operators a step, {percent(share)} of its time, each read and write their tensors "
            "again",
            "compile the model: model = torch.compile(model)",
            share / 2, HowKnown.ESTIMATED,
            details=(
                "that fusing them saves half of their time is an estimate; `hasten tune` measures it",
                "compiling is too dear to be tried in this run, as cheaper changes are",
                "compiling takes seconds to minutes as the training begins",
                "what launch_bound and allocator say may be the same time: their worths are no sum",
            ),
            setting="default",
        )  # fmt: skip
