"""The optimizer updates tensors one by one, where a single fused kernel would do.

## Why it is slow

A model has hundreds of parameters, most of them small. Each needs several kernel launches per step, which take longer
than the arithmetic.

## How it is known

hasten switches the fused optimizer on and off during the run, in blocks of steps. Where the run was too short for
that, it times the optimizer's step after the run on parameters of the same shapes.

## Example

```python
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
```

## Use instead

```python
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
```

## When the repair is safe

Results differ by rounding. Optimizers with closures, sparse gradients or `differentiable=True` cannot be fused.

## Source

- PyTorch performance tuning guide
- Kuhn, tip 4
"""

from __future__ import annotations

from collections.abc import Iterable

from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Problem
from hasten.doctor.source.syntax import argument, is_name
from hasten.evidence import Evidence, Finding, HowKnown, Phase
from hasten.evidence.figures import percent
from hasten.evidence.weigh import LEAST, in_words, is_sure, seconds_of, share_of, switched
from hasten.techniques.base import Refusal
from hasten.techniques.compute.fused_optimizer import FusedOptimizer


class PerTensorOptimizer(Rule):
    cure = FusedOptimizer
    tried = True
    of_optimizer = True

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if a fused optimizer was measured faster."""
        tried = evidence.measured_for(cls.name)
        measured_seconds = sum(trial.before * trial.calls for trial in tried)
        known = measured_seconds > 0 or is_sure(evidence, cls.name)
        if not known or isinstance(FusedOptimizer.settings(evidence), Refusal):
            return None
        phase = share_of(evidence, seconds_of(evidence, Phase.OPTIMIZER))
        fusable = next(
            (optimizer for optimizer in evidence.optimizers if optimizer.fusable and not optimizer.fused), None
        )
        message, place, gain = (
            f"the optimizer takes {percent(phase)} of the step, not fused",
            fusable.where if fusable else "",
            0.0,
        )
        if measured_seconds > 0:
            first = max(tried, key=lambda trial: trial.saved * trial.calls)
            gain, place = sum(trial.saved * trial.calls for trial in tried) / measured_seconds, first.where
            subject = f"the optimizer takes {percent(phase)} of the step"
            message = f"{subject}; {first.what}, it takes {percent(first.gain)} less"
        if len(tried) > 1:
            subject = f"{len(tried)} optimizers take {percent(phase)} of the step"
            message = f"{subject}; fused, they take {percent(gain)} less together"
        worth, how_known, live = switched(evidence, cls.name, phase * gain, HowKnown.MEASURED)
        return cls.timed(
            message,
            "build them with fused=True" if len(tried) > 1 else "build it with fused=True",
            worth, how_known,
            place=place,
            details=(*live, *map(in_words, tried)),
            setting="true",
        )  # fmt: skip

    @classmethod
    def may_help(cls, evidence: Evidence) -> bool:
        """Return whether the optimizer takes 1 % of the step or more."""
        return share_of(evidence, seconds_of(evidence, Phase.OPTIMIZER)) >= LEAST

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find optimizers built with `foreach=False`."""
        for call in code.script.optimizers:
            if is_name(argument(call, "foreach"), "False") and not is_name(argument(call, "fused"), "True"):
                yield Problem(
                    call, "the optimizer updates one tensor at a time", "remove foreach=False, or give fused=True"
                )
