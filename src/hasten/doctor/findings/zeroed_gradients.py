"""Gradients are filled with zeros instead of being dropped.

## Why it is slow

The zeros are written, read and added to. If gradients are dropped, the backward stores its own tensors instead.

## How it is known

hasten switches dropping gradients on and off during the run. Where that was not done: the measured time of
`zero_grad(set_to_none=False)`, or else an estimate from the size of the gradients.

## Example

```python
optimizer.zero_grad(set_to_none=False)
criterion(model(images), labels).backward()
```

## Use instead

```python
optimizer.zero_grad()
criterion(model(images), labels).backward()
```

## When the repair is safe

Safe where every parameter gets a gradient in every step and nothing reads `.grad` before the backward. `hasten fix`
does not change files that read `.grad`.

## Source

- Lin, tip 14
- Kuhn, tip 10
"""

from __future__ import annotations

from collections.abc import Iterable

import libcst as cst

from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Edit, Problem
from hasten.doctor.source.syntax import is_name, last_name, without_argument
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.waiting import in_ms, per_step
from hasten.evidence.weigh import on_gpu, share_of, switched
from hasten.techniques.memory.set_to_none import SetToNone

_BYTES, _GPU_BYTES = 10e9, 2e12  # bytes of memory moved per second


class ZeroedGradients(Rule):
    cure = SetToNone
    tried = True

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if a `zero_grad(set_to_none=False)` costs 1 % of the step or more."""
        events = evidence.events_of("zero_grad")
        if evidence.flags.missing_gradients or not events:
            return None
        # Writing the zeros, then reading and adding to them in the backward: three passes over four bytes each.
        moved = 3 * 4 * max((model.trained_parameters for model in evidence.models), default=0)
        measured = per_step(evidence, events)
        # Under accumulation gradients are zeroed in only some of the steps.
        times = min(1.0, max(event.steps for event in events) / evidence.steps) if evidence.steps else 0.0
        seconds = measured or times * moved / (_GPU_BYTES if on_gpu(evidence) else _BYTES)
        how_known = HowKnown.MEASURED if measured else HowKnown.ESTIMATED
        worth, how_known, live = switched(evidence, cls.name, share_of(evidence, seconds), how_known)
        return cls.timed(
            f"gradients of {moved / 12 / 1e6:.1f} M parameters are filled with zeros instead of dropped, "
            f"{'' if measured else 'about '}{in_ms(seconds)} a step",
            "call `optimizer.zero_grad()` without set_to_none=False",
            worth,
            how_known,
            place=events[0].where or evidence.flags.zeroed_gradients,
            details=(*live, "the result stays the same as long as every parameter gets a gradient in every step"),
            setting="true",
        )

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find `zero_grad(set_to_none=False)`."""
        for call in code.script.calls:
            if last_name(call.func) != "zero_grad" or not isinstance(call.func, cst.Attribute) or len(call.args) != 1:
                continue
            arg = call.args[0]
            if arg.star or not is_name(arg.value, "False") or (arg.keyword and arg.keyword.value != "set_to_none"):
                continue
            if any(isinstance(node, cst.Attribute) and node.attr.value == "grad" for node in code.script.nodes):
                continue  # the file reads `.grad`, which would be None
            yield Problem(
                call,
                "gradients are set to zero instead of being let go",
                "remove set_to_none=False",
                (Edit(call, lambda now: without_argument(now, now.args[0])),),
            )
