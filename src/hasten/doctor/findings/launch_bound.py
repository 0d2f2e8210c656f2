"""Operators are so small that starting them takes longer than what they compute.

## Why it is slow

Each operator costs some microseconds of Python, dispatch and launch, whatever its size. Below that the device waits
for the CPU.

## How it is known

On a GPU: its idleness and the number of kernels a step. On a CPU: the number of operators, times what one costs that
has next to nothing to do, measured on the spot.

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
_LAUNCH = 5e-6  # seconds of the host to launch a kernel, at the least
_OPERATOR = 3e-6  # seconds of Python and torch around an operator on a CPU; measured where that could be done
_MOST = 8e-6  # of these, whatever was measured
_FAR = 4  # times that, from which on a matrix product computes: under the profiler it looks longer than it is


class LaunchBound(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """On a GPU: it waits while the host launches. On a CPU: what operators cost that have next to nothing to do."""
        return _idle_gpu(evidence) if on_gpu(evidence) else _small_operators(evidence)


def _idle_gpu(evidence: Evidence) -> Finding | None:
    sampled = evidence.sampled
    if sampled is None or sampled.launches is None or sampled.device_busy is None or sampled.device_busy > 0.7:
        return None
    if share_of(evidence, sampled.launches * _LAUNCH) < 0.2:  # it is idle for another reason
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
    sampled = evidence.sampled
    seconds = seconds_of(evidence, *_WORK)
    if sampled is None or sampled.calls < 10:
        return None
    # How many operators L-BFGS runs is a matter of its history and line search; twice the batch took twice as long.
    if any(optimizer.name == "LBFGS" for optimizer in evidence.optimizers):
        return None
    tried = evidence.measured_for(LaunchBound.name)
    # Measured on a machine that was busier than during the run it would be too much.
    least = min(tried[0].before, tried[0].after, _MOST) if tried else _OPERATOR
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
