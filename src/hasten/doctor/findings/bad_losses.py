"""The loss was NaN or infinite.

## Why it is slow

Every step after a NaN is wasted: its gradients turn all weights into NaN, and the time until somebody notices is lost.

## How it is known

Losses are read once the device has computed them, without making the training wait.

## Example

```python
with torch.autocast("cuda", torch.float16):
    loss = criterion(model(images), labels)
loss.backward()
optimizer.step()
```

## Use instead

```python
with torch.autocast("cuda", torch.bfloat16):
    loss = criterion(model(images), labels)
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
```

## When the repair is safe

The change alters the training, which is its purpose. Run the step before the first NaN under
`torch.autograd.detect_anomaly()` to see which operator produced it.

## Source

- torch.autograd.set_detect_anomaly
"""

from __future__ import annotations

import math

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, Severity


class BadLosses(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if losses were NaN or infinite; HIGH if they stayed so or were more than a tenth."""
        if not evidence.bad_losses:
            return None
        bad = [index for index, loss in enumerate(evidence.losses) if loss is None or not math.isfinite(loss)]
        steps = max(evidence.steps, evidence.bad_losses)
        first = f", the first in step {evidence.number(bad[0]) + 1}" if bad else ""
        # The last loss is bad as well: the training did not recover.
        unrecovered = bool(bad) and bad[-1] == len(evidence.losses) - 1
        half = any(model.autocast == "float16" or model.dtype == "float16" for model in evidence.models)
        unscaled = half and not evidence.flags.grad_scaler
        optimizer_place = next((optimizer.where for optimizer in evidence.optimizers if optimizer.steps), "")
        return cls.finding(
            f"{evidence.bad_losses} of {steps} losses were NaN or infinite{first}",
            "compute in bfloat16, or scale the loss with torch.amp.GradScaler"
            if unscaled
            else "run the step before under torch.autograd.detect_anomaly() to see which operator made it; then a "
            "lower rate, a warm-up or clipped gradients",
            Severity.HIGH if unrecovered or evidence.bad_losses > steps / 10 else Severity.MEDIUM,
            place=optimizer_place,
            details=("it computes in float16 without a GradScaler",) if unscaled else (),
        )
