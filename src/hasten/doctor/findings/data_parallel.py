"""`torch.nn.DataParallel` drives all GPUs from one process.

## Why it is slow

DataParallel copies the model to every GPU in each step and runs the copies in threads of one Python interpreter, which
take turns. DistributedDataParallel has one process per GPU and exchanges only gradients.

## How it is known

The script built a DataParallel. The worth is the average idle time of the GPUs, an upper bound.

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

Start the script with `torchrun --nproc-per-node=N` and use a DistributedSampler. BatchNorm sees the batch of one
process, and the loader's batch size is that of one process. Alternatively change nothing:
`hasten run --devices N train.py` splits each batch among the devices.

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
        """Return a finding for a DataParallel on two or more GPUs."""
        built = evidence.events_of("data_parallel")
        used = built or any(model.name == "DataParallel" for model in evidence.models)
        gpus = len(evidence.machine.gpus)
        if not used or not on_gpu(evidence) or gpus < 2:
            return None
        busy = _busy(evidence)
        idle = 1 - statistics.fmean(busy) if len(busy) > 1 else 0.0
        worth = idle if idle >= 0.01 else None
        usage = f", and the GPUs compute {percent(1 - idle)} of the time" if worth else ""
        return cls.finding(
            f"DataParallel copies the model to {gpus} GPUs in each step, from one process with one interpreter{usage}",
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
        """Return whether the run built a DataParallel, or may have: False only if doctor watched and saw none."""
        if not evidence.step_phases or evidence.listened != "doctor":
            return True
        return any(model.name == "DataParallel" for model in evidence.models) or bool(evidence.events_of(cls.name))

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find models wrapped in DataParallel."""
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
    """Return how busy each GPU was, 0 to 1, without the GPUs that the training did not use."""
    means = [mean_during(evidence, gpu.busy) for gpu in evidence.used.gpus]
    return [mean for mean in means if mean is not None and mean >= 0.02]
