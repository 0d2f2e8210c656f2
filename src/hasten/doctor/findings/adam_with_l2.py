"""Adam divides `weight_decay` by the size of the gradients, which weakens it.

## Why it is slow

This costs no time. Adam adds the decay to the gradient and then scales the sum, so weights with large gradients hardly
decay. AdamW decays the weights directly and often reaches the same loss in fewer steps.

## Example

```python
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
```

## Use instead

```python
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
```

## When the repair is safe

The change alters how the model learns. AdamW needs another value of `weight_decay`, often 0.01 to 0.1: compare the
validation loss.

## Source

- Loshchilov, Hutter, Decoupled Weight Decay Regularization, 2019
- Kuhn, tip 4
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Problem
from hasten.doctor.source.syntax import argument, last_name
from hasten.evidence import Evidence, Finding, Severity

_L2 = ("Adam", "NAdam", "RAdam", "Adamax")


class AdamWithL2(Rule):
    severity = Severity.NOTE
    of_optimizer = True

    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding]:
        """Return a finding for each optimizer that adds its weight decay to the gradients."""
        for optimizer in evidence.optimizers:
            decay = optimizer.options.get("weight_decay", 0.0)
            decoupled = optimizer.options.get("decoupled_weight_decay") in (True, "True")
            if optimizer.name not in _L2 or isinstance(decay, str) or not decay or decoupled:
                continue
            cure = "torch.optim.AdamW" if optimizer.name == "Adam" else "decoupled_weight_decay=True"
            yield cls.finding(
                f"{optimizer.name} with weight_decay={decay:g} adds it to the gradients, where it hardly decays "
                "weights that have large ones",
                f"use {cure} (its weight_decay wants another value, often 0.01 to 0.1)",
                Severity.NOTE,
                place=optimizer.where,
            )

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find Adam built with a positive `weight_decay`."""
        for call in code.script.optimizers:
            if last_name(call.func) != "Adam" or argument(call, "decoupled_weight_decay") is not None:
                continue
            decay = code.script.value_of(argument(call, "weight_decay", 4))
            if isinstance(decay, int | float) and decay > 0:
                yield Problem(
                    call, f"Adam's weight_decay={decay:g} is scaled away by Adam", "use AdamW if weight decay is meant"
                )
