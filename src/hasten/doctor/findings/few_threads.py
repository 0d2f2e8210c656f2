"""A CPU training computes on fewer threads than there are idle cores.

## Why it is slow

Matrix products are divided among threads. With fewer threads than cores, the remaining cores are idle.

## How it is known

torch's number of threads, the CPU use, and the time of the matrix products that are long enough to be divided.

## Example

```python
torch.set_num_threads(1)
```

## Use instead

```python
torch.set_num_threads(os.cpu_count())
```

## When the repair is safe

Results differ by rounding, since sums are divided differently. Not safe where several trainings share the machine.

## Source

- PyTorch performance tuning guide, CPU
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.waiting import mean_during, saturated
from hasten.evidence.weigh import COMPUTE, on_gpu, products, seconds_of, share_of

_LONG = 3e-4  # seconds: shorter products gain nothing from more threads
_GAIN = 0.8  # share of the ideal speed-up that threads reach
_MOST = 4  # greatest speed-up that is promised, whatever the number of cores


class FewThreads(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if torch uses fewer threads than cores are idle."""
        use, cores, threads = evidence.use, evidence.machine.cores, evidence.flags.threads
        if use is None or on_gpu(evidence) or not 0 < threads < cores or evidence.flags.distributed > 1:
            return None
        working = mean_during(evidence, use.workers) or 0.0
        usable = min(round(cores - working), _MOST * threads)
        if saturated(evidence) is not None or usable <= threads:
            return None
        share = share_of(evidence, products(evidence, least=_LONG))
        compute = share_of(evidence, seconds_of(evidence, *COMPUTE))
        return cls.timed(
            f"torch computes on {threads} of {cores} cores (OMP_NUM_THREADS, or torch.set_num_threads)",
            f"let it have {usable} threads: take the setting out, or set it to {usable}",
            _GAIN * min(share, compute) * (1 - threads / usable),
            HowKnown.ESTIMATED,
        )
