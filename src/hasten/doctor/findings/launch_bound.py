"""Operators are so small that launching them takes longer than computing them.

## Why it is slow

Each operator costs some microseconds of Python, dispatch and kernel launch, whatever its size. If an operator computes
for less than that, the device waits for the CPU.

## How it is known

On a GPU: its idle time and the number of kernels per step. On a CPU: the number of operators multiplied by the
overhead of one operator, which is measured after the run on an operator that computes almost nothing.

## Example

```python
loader = DataLoader(dataset, batch_size=8)
```

## Use instead

```python
loader = DataLoader(dataset, batch_size=64)
model = torch.compile(model, mode="reduce-overhead")
```

## When the repair is safe

Compiling changes results by rounding. Another batch size changes how the model learns.

## Source

- PyTorch performance tuning guide
- NVIDIA, CUDA Graphs
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown, Phase
from hasten.evidence.figures import percent
from hasten.evidence.weigh import on_gpu, products, seconds_of, share_of, short, steady_seconds

_WORK = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_LAUNCH = 5e-6  # least seconds of CPU time to launch a kernel
_OPERATOR = 3e-6  # seconds of overhead per operator on a CPU, if it was not measured
_MOST = 8e-6  # greatest overhead per operator that is believed, whatever was measured
_FAR = 4  # a matrix product that takes this many overheads computes; the profiler makes short ones look longer


class LaunchBound(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if the GPU waits for launches, or if a CPU spends the step on the overhead of operators."""
        return _idle_gpu(evidence) if on_gpu(evidence) else _small_operators(evidence)


def _idle_gpu(evidence: Evidence) -> Finding | None:
    """Return a finding if launching kernels keeps the CPU busy while the GPU is idle."""
    sampled = evidence.sampled
    if sampled is None or sampled.launches is None or sampled.device_busy is None or sampled.device_busy > 0.7:
        return None
    if share_of(evidence, sampled.launches * _LAUNCH) < 0.2:  # the GPU is idle for another reason
        return None
    idle = min(1 - sampled.device_busy, share_of(evidence, seconds_of(evidence, *_WORK)))
    return LaunchBound.timed(
        f"the GPU computes {percent(sampled.device_busy)} of the time, the host launches {sampled.launches:.0f} "
        f"kernels in a step of {short(steady_seconds(evidence))}",
        'use a bigger batch, or torch.compile(model, mode="reduce-overhead"), which replays a step\'s kernels at once',
        idle / 2,
        HowKnown.ESTIMATED,
    )


def _small_operators(evidence: Evidence) -> Finding | None:
    """Return a finding if the overhead of operators takes 30 % of the step or more on a CPU."""
    sampled = evidence.sampled
    seconds = seconds_of(evidence, *_WORK)
    if sampled is None or sampled.calls < 10:
        return None
    # L-BFGS runs many operators for its history and line search, and a bigger batch does not help: in a test twice
    # the batch took twice as long.
    if any(optimizer.name == "LBFGS" for optimizer in evidence.optimizers):
        return None
    tried = evidence.measured_for(LaunchBound.name)
    # The overhead is measured after the run; a machine that is busier by then would show too much.
    least = min(tried[0].before, tried[0].after, _MOST) if tried else _OPERATOR
    # Products long enough to compute are not overhead.
    overhead = share_of(evidence, min(seconds - products(evidence, least=_FAR * least), sampled.calls * least))
    if overhead < 0.3:
        return None
    measured = f"; one on 64 numbers takes {short(least)}" if tried and least < seconds / sampled.calls else ""
    compiling = "" if any(model.compiled for model in evidence.models) else ", or try to compile the model"
    return LaunchBound.timed(
        f"{sampled.calls:.0f} operators in {short(seconds)}, {short(seconds / sampled.calls)} each: "
        f"{percent(overhead)} of the step goes into starting them{measured}",
        f"use a bigger batch (with twice the batch a sample costs half of that){compiling}",
        overhead / 2,
        HowKnown.ESTIMATED,
    )
