"""torch.compile compiles the same code repeatedly.

## Why it is slow

Each compilation takes seconds. It happens when a size, a Python number or a type differs from those that the code was
compiled for.

## How it is known

torch's own list of recompilations. The cost is the time that slow steady steps, over three times as long as the
median, took beyond the median.

## Example

```python
@torch.compile
def forward(x, step):
    return model(x) * step
```

## Use instead

```python
@torch.compile
def forward(x, step):  # a tensor: torch.tensor(float(step))
    return model(x) * step
```

## When the repair is safe

Always: pad to a few sizes, call `torch._dynamo.mark_dynamic(x, 0)`, or pass tensors instead of Python numbers.

## Source

- torch.compile, recompilations
"""

from __future__ import annotations

from hasten.doctor.figures import by_place, first_line_of, lost_in_outliers
from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown, severity_of
from hasten.evidence.weigh import LEAST

_FEW = 3  # least recompilations: with fewer, torch only learns which sizes vary


class Recompilations(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding for three or more recompilations; its worth is what slow steps took beyond the median."""
        sampled = evidence.sampled
        reasons = sampled.recompilations if sampled else ()
        if sampled is None or len(reasons) < _FEW:
            return None
        # If every step recompiles, the median is slow too; the time of the operators tells how long a step should take.
        worth = lost_in_outliers(evidence, sum(operator.seconds for operator in sampled.operators))
        known_worth = worth if worth >= LEAST else None
        place = next(iter(by_place(reasons)), "")
        return cls.finding(
            f"torch.compile recompiled {len(reasons)} times: {first_line_of(reasons[0], place)}",
            "keep what changes out of compiled code: pad to a few sizes, torch._dynamo.mark_dynamic, tensors in place "
            "of Python numbers",
            severity_of(known_worth), known_worth, HowKnown.ESTIMATED,
            place=place,
            details=tuple(dict.fromkeys(reasons)),
        )  # fmt: skip
