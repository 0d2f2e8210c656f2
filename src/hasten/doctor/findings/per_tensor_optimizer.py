"""The optimizer updates tensors one by one where one fused kernel would do.

## Why it is slow

A model has hundreds of parameters, most of them small. Each costs several kernel launches a step, which take longer
than the arithmetic.

## How it is known

Switched on and off in the run itself, in blocks of steps. Where the run was too short for that: the optimizer's step
tried on parameters of the same shapes.

## Example

```python
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
```

## Use instead

```python
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
```

## When the repair is safe

Results differ by rounding. Closures, sparse gradients and `differentiable=True` cannot be fused.

## Source

- PyTorch performance tuning guide
- Kuhn, tip 4
"""

from __future__ import annotations

from collections.abc import Iterable

from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Problem
from hasten.doctor.source.syntax import argument, is_word
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
        """Return at most one finding."""
        tried = evidence.measured_for(cls.name)
        taken = sum(one.before * one.calls for one in tried)
        if not (taken > 0 or is_sure(evidence, cls.name)) or isinstance(FusedOptimizer.settings(evidence), Refusal):
            return None
        phase = share_of(evidence, seconds_of(evidence, Phase.OPTIMIZER))
        able = next((one for one in evidence.optimizers if one.fusable and not one.fused), None)
        words, place, less = (
            f"the optimizer takes {percent(phase)} of the step, not fused",
            able.where if able else "",
            0.0,
        )
        if taken > 0:
            first = max(tried, key=lambda one: one.saved * one.calls)
            less, place = sum(one.saved * one.calls for one in tried) / taken, first.where
            takes = f"the optimizer takes {percent(phase)} of the step"
            words = f"{takes}; {first.what}, it takes {percent(first.gain)} less"
        if len(tried) > 1:
            take = f"{len(tried)} optimizers take {percent(phase)} of the step"
            words = f"{take}; fused, they take {percent(less)} less together"
        worth, how_known, live = switched(evidence, cls.name, phase * less, HowKnown.MEASURED)
        return cls.timed(
            words,
            "build them with fused=True" if len(tried) > 1 else "build it with fused=True",
            worth, how_known,
            place=place,
            details=(*live, *map(in_words, tried)),
            setting="true",
        )  # fmt: skip

    @classmethod
    def may_help(cls, evidence: Evidence) -> bool:
        """Return whether the optimizer takes a share of the step that counts."""
        return share_of(evidence, seconds_of(evidence, Phase.OPTIMIZER)) >= LEAST

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find optimizers built with `foreach=False`."""
        for call in code.script.optimizers:
            if is_word(argument(call, "foreach"), "False") and not is_word(argument(call, "fused"), "True"):
                yield Problem(
                    call, "the optimizer updates one tensor at a time", "remove foreach=False, or give fused=True"
                )
