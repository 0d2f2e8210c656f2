"""`torch.nn.DataParallel` feeds all GPUs from one process.

## Why it is slow

It copies the model to every GPU in each step and runs them from threads of one Python interpreter, which takes turns.
DistributedDataParallel has one process a GPU and exchanges gradients only.

## How it is known

From its having been built, and from how busy the GPUs are beside the busiest.

## Example

```python
model = nn.DataParallel(model)
```

## Use instead

```python
torch.distributed.init_process_group()
model = DistributedDataParallel(model)
```

## When the repair is safe

Start it with `torchrun --nproc-per-node=N`, with a DistributedSampler. BatchNorm sees each process's batch; the batch
size of the loader is that of one process. Or change nothing: `hasten run --devices N train.py` shares each batch out.

## Source

- PyTorch, torch.nn.DataParallel
- Falcon, tip 9
- Kuhn, tip 10
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Problem
from hasten.evidence import Evidence, Finding, HowKnown, Severity, severity_of
from hasten.evidence.figures import percent
from hasten.evidence.waiting import mean_during
from hasten.evidence.weigh import on_gpu


class DataParallel(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return at most one finding."""
        built = evidence.events_of("data_parallel")
        used = built or any(model.name == "DataParallel" for model in evidence.models)
        gpus = len(evidence.machine.gpus)
        if not used or not on_gpu(evidence) or gpus < 2:
            return None
        busy = _busy(evidence)
        idle = 1 - statistics.fmean(busy) if len(busy) > 1 else 0.0
        worth = idle if idle >= 0.01 else None
        how = f", and the GPUs compute {percent(1 - idle)} of the time" if worth else ""
        return cls.finding(
            f"DataParallel copies the model to {gpus} GPUs in each step, from one process with one interpreter{how}",
            f"run it unchanged by `hasten run --devices {gpus}`, one process a GPU; or wrap the model in "
            f"DistributedDataParallel and start it with `torchrun --nproc-per-node={gpus}`",
            severity_of(worth) if worth else Severity.MEDIUM,
            worth,
            HowKnown.ESTIMATED,
            place=built[0].where if built else "",
            details=("at the most: as if no GPU were idle any more",) if worth else (),
        )

    @classmethod
    def holds(cls, finding: Finding, evidence: Evidence) -> bool:
        """Not where the run never came to that line."""
        if not evidence.step_phases or evidence.listened != "doctor":
            return True
        return any(model.name == "DataParallel" for model in evidence.models) or bool(evidence.events_of(cls.name))

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find models that are wrapped in DataParallel."""
        for call in code.script.calls:
            full = code.script.qualified(call.func)
            if full in (
                "torch.nn.DataParallel",
                "torch.nn.parallel.DataParallel",
                "torch.nn.parallel.data_parallel.DataParallel",
            ):
                yield Problem(
                    call,
                    "DataParallel copies the model to every GPU in every step",
                    "run it by `hasten run --devices N`, one process a GPU, or by torchrun as DistributedDataParallel",
                )


def _busy(evidence: Evidence) -> list[float]:
    """Return how busy each GPU of the training was, 0 to 1; those that it left alone are left out."""
    means = [mean_during(evidence, gpu.busy) for gpu in evidence.used.gpus]
    return [mean for mean in means if mean is not None and mean >= 0.02]
