"""Matrix products and convolutions run in float32, although a 16-bit dtype is faster on this machine.

## Why it is slow

Tensor cores, and CPUs with bf16 instructions, compute 16-bit products several times faster, and only half as many
bytes are moved.

## How it is known

hasten switches autocast on and off during the run, in blocks of steps; on a CPU glibc keeps its memory during that, as
the fix advises. Where the run was too short for that, it times single layers after the run. On a GPU where neither was
done, the worth is half of the time of matrix products and convolutions. On a CPU the layers only represent a step that
was not timed, so the worth is an estimate, and below 5 % nothing is reported. A CPU training with LBFGS is not
reported: its line search compares losses that differ by less than bfloat16 can resolve.

## Example

```python
loss = criterion(model(images), labels)
loss.backward()
```

## Use instead

```python
with torch.autocast("cuda", torch.bfloat16):
    loss = criterion(model(images), labels)
loss.backward()
```

## When the repair is safe

Results differ by rounding. float16 also needs a `torch.amp.GradScaler`. `hasten tune` compares the losses with those
of other seeds.

## Source

- Falcon, tip 6
- Wolf
- Lin, tip 8
- Kuhn, tip 5
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.figures import percent
from hasten.evidence.weigh import CERTAIN, COMPUTE, gain_of, is_sure, on_gpu, products, saved, seconds_of, share_of
from hasten.plan import Setting
from hasten.techniques.base import Refusal
from hasten.techniques.compute.precision import Precision
from hasten.techniques.memory.allocator import Allocator, keeping


class FullPrecision(Rule):
    cure = Precision
    tried = "bf16-mixed"

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if the `precision` technique applies and 16 bits were, or are estimated to be, faster."""
        choices = Precision.settings(evidence)
        if isinstance(choices, Refusal):
            return None
        setting = str(choices.settings[0])
        narrow = "bfloat16" if setting.startswith("bf16") else "float16"
        scaled = "" if narrow == "bfloat16" else " and a torch.amp.GradScaler"
        device = "cuda" if on_gpu(evidence) else "cpu"
        fix = f'run the forward and the loss under torch.autocast("{device}", torch.{narrow}){scaled}'
        tried = evidence.measured_for(cls.name)
        if device == "cpu":
            too_little = saved(evidence, tried) < CERTAIN and not is_sure(evidence, cls.name)
            if too_little or any(optimizer.name == "LBFGS" for optimizer in evidence.optimizers):
                return None
            # The casts allocate memory that glibc would return at each step, which can cost more than bf16 gains.
            fix += keeping(evidence)
        if tried:
            worth = saved(evidence, tried)
            how_known = HowKnown.MEASURED if device == "cuda" else HowKnown.ESTIMATED
            layers = tried[0].what.partition(":")[0]
            what = (
                f"{layers} and the like compute in float32; in {narrow} they take {percent(gain_of(tried))} less time"
            )
        elif device == "cpu":
            # No estimate without a trial; `switched` puts in the gain that switching showed.
            worth, how_known, what = (
                0.0,
                HowKnown.ESTIMATED,
                f"the model computes in float32, which {narrow} is faster than",
            )
        else:
            share = share_of(evidence, products(evidence))
            worth, how_known = share / 2, HowKnown.ESTIMATED
            what = f"matrix products and convolutions, {percent(share)} of the step, compute in float32 on tensor cores"
        return cls.switched(evidence, what, fix, worth, how_known, setting=setting)

    @classmethod
    def may_help(cls, evidence: Evidence) -> bool:
        """Return whether forward and backward take 5 % of the step or more, and no LBFGS on a CPU compares losses."""
        searches = any(optimizer.name == "LBFGS" for optimizer in evidence.optimizers) and not on_gpu(evidence)
        return not searches and share_of(evidence, seconds_of(evidence, *COMPUTE)) >= CERTAIN

    @classmethod
    def to_try(cls, evidence: Evidence) -> dict[str, Setting]:
        """Return what to switch; on a CPU together with glibc's memory kept, as the fix advises."""
        techniques = super().to_try(evidence)
        if techniques and not on_gpu(evidence) and keeping(evidence):
            techniques[Allocator.name] = "glibc"
        return techniques
