"""Validation takes a fifth of the time or more.

## Why it is slow

The training stands still while the model is evaluated.

## How it is known

The measured time of forwards in eval mode or without gradients, and of validation loaders. The worth is that of
validating half as often.

## Example

```python
for epoch in range(100):
    train(epoch)
    validate()
```

## Use instead

```python
for epoch in range(100):
    train(epoch)
    if epoch % 2 or epoch == 99:
        validate()
```

## When the repair is safe

Where nothing (early stopping, a schedule, the choice of the best weights) counts validations.

## Source

- Falcon, Lightning guide
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown, Phase
from hasten.evidence.figures import percent
from hasten.evidence.weigh import seconds_of

_OFTEN = 0.20  # share of the time from which validation is too much
_EACH_STEP = 0.5  # share of the steps from which forwards without gradients are no validation: a policy that acts


class FrequentValidation(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return one finding where validation takes a fifth of the time or more."""
        whole = seconds_of(evidence, *Phase)
        validation = seconds_of(evidence, Phase.VALIDATION)
        steps = evidence.steady()
        validating = [step for step in steps if evidence.step_phases[step][Phase.VALIDATION] > 0]
        if whole <= 0 or validation < _OFTEN * whole or len(validating) > _EACH_STEP * len(steps):
            return None
        every = f", after every {len(steps) / len(validating):.0f} steps" if validating else ""
        return cls.timed(
            f"validation takes {percent(validation / whole)} of the time{every}",
            "validate less often, on fewer batches, or in bigger ones; half of it would do for a start",
            validation / whole / 2,
            HowKnown.ESTIMATED,
        )
