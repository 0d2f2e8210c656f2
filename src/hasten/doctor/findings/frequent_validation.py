"""Validation takes a fifth of the time or more.

## Why it is slow

No training step runs while the model is validated.

## How it is known

The measured time of forwards in eval mode or without gradients, and of validation loaders. The worth is the time saved
by validating half as often.

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

Safe where nothing counts validations: early stopping, a schedule, or the choice of the best weights.

## Source

- Falcon, Lightning guide
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown, Phase
from hasten.evidence.figures import percent
from hasten.evidence.weigh import seconds_of

_OFTEN = 0.20  # share of the time from which validation counts as too frequent
_EACH_STEP = 0.5  # in a greater share of the steps, forwards without gradients are no validation: a policy acting


class FrequentValidation(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if validation takes a fifth of the time or more."""
        total = seconds_of(evidence, *Phase)
        validation = seconds_of(evidence, Phase.VALIDATION)
        steps = evidence.steady()
        validating = [step for step in steps if evidence.step_phases[step][Phase.VALIDATION] > 0]
        if total <= 0 or validation < _OFTEN * total or len(validating) > _EACH_STEP * len(steps):
            return None
        frequency = f", after every {len(steps) / len(validating):.0f} steps" if validating else ""
        return cls.timed(
            f"validation takes {percent(validation / total)} of the time{frequency}",
            "validate less often, on fewer batches, or in bigger ones; half of it would do for a start",
            validation / total / 2,
            HowKnown.ESTIMATED,
        )
