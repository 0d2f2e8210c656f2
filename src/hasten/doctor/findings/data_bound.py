"""The step waits for its batches.

## Why it is slow

While the training waits for a batch, the device that computes is idle.

## How it is known

The measured wait in the steady steps. The causes of the wait come from the CPU use, from the loader's stages and from
its passes.

## Example

```python
loader = DataLoader(dataset, batch_size=64)
```

## Use instead

```python
loader = DataLoader(dataset, batch_size=64, num_workers=4, persistent_workers=True)
```

## When the repair is safe

Workers draw other random numbers for augmentation. Findings beside this one (`workers_zero`, `slow_decode`,
`python_getitem`, ...) say what the wait consists of and how to remove it.

## Source

- Falcon, tip 1
- Lin, tip 1
- Kuhn, tip 2
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from hasten.doctor.figures import BOUND
from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown, LoaderFacts, Phase
from hasten.evidence.figures import percent
from hasten.evidence.waiting import in_ms, mean_during, ordinary_seconds, ordinary_wait, saturated, stages_of
from hasten.evidence.weigh import seconds_of, share_of
from hasten.techniques.data.worker_estimate import workers_for

_BUSY = 0.85  # share of a core from which a worker counts as always busy
_LITTLE = 1e-4  # seconds: a shorter wait is the loader's own bookkeeping and needs no cause


class DataBound(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if the step waits 10 % of its time or more, with the causes as details."""
        loader, wait = evidence.train_loader, seconds_of(evidence, Phase.DATA)
        share = share_of(evidence, wait)
        if loader is None or share < BOUND:
            return None
        causes = tuple(_causes(evidence, loader))
        return cls.timed(
            f"the step waits {percent(share)} of its time for data, {in_ms(wait)} for each batch",
            _remedy(evidence, loader),
            share,
            HowKnown.MEASURED,
            place=loader.where,
            details=causes,
        )


def _causes(evidence: Evidence, loader: LoaderFacts) -> Iterator[str]:
    """Yield a sentence for each known cause of the wait."""
    workers, cores = loader.num_workers, evidence.machine.cores
    if not workers:
        yield "every batch is made in the training process, while the model waits (num_workers=0)"
    if loader.probe is not None and loader.probe.fork_unsafe:
        yield f"the dataset {loader.probe.fork_unsafe}, which workers cannot share: open it in each of them"
    working = mean_during(evidence, evidence.used.workers)
    busy = saturated(evidence)
    if busy is not None and _threads_spin(evidence, loader):
        yield f"no core of {cores} is idle, but one thread makes the samples: the others only wait for work"
    elif busy is not None:
        # Without workers, the first one still brings something where others fill the cores: it gets its share of them.
        less = "more workers will not help, cheaper samples or more cores will"
        less = less if workers else "cheaper samples or more cores will help more than workers"
        yield f"no core of {cores} is idle (the training uses {busy:.1f}): {less}"
    elif workers and working is not None and working >= _BUSY * workers:
        yield f"the {workers} workers are busy all the time ({working:.1f} cores of {cores})"
    elif workers and working is not None and working < 0.4 * workers and ordinary_wait(evidence) > _LITTLE:
        yield f"the {workers} workers compute little ({working:.1f} cores): they wait for a disk or a network"
    stages = stages_of(evidence, loader)
    if stages is not None:
        slowest = max(stages.by_name, key=stages.by_name.__getitem__)
        label = "the dataset's own code" if slowest == "other" else slowest
        share = stages.by_name[slowest] / stages.seconds
        yield f"a batch takes {in_ms(stages.seconds)} in one process, {percent(share)} of it {label}"
    # The mean wait includes the first batches of passes; the ordinary wait leaves them out.
    mean, ordinary = seconds_of(evidence, Phase.DATA), ordinary_wait(evidence)
    if mean > 0 and (mean - ordinary) / mean >= 0.3:
        yield f"{percent((mean - ordinary) / mean)} of the wait is for the first batches of epochs"


def _remedy(evidence: Evidence, loader: LoaderFacts) -> str:
    """Return how to shorten the wait, given the CPU cores that are still idle."""
    cores = evidence.machine.cores
    wait, step = ordinary_wait(evidence), ordinary_seconds(evidence)
    if seconds_of(evidence, Phase.DATA) > 2 * wait:
        return "keep the workers between epochs (persistent_workers=True): it is the epochs' starts that are waited for"
    if loader.dataset == "TensorDataset" or (loader.probe is not None and loader.probe.in_memory):
        return "gather whole batches of the tensors at once (see sample_by_sample)"
    if not loader.num_workers and (saturated(evidence) is None or _threads_spin(evidence, loader)):
        return "make batches beside the step: worker processes, or samples kept decoded (see the findings below)"
    # While workers are the bottleneck, each takes `num_workers` steps for a batch. So many workers make batches as
    # fast as the model uses them; the small subtrahend keeps rounding noise from asking for one more.
    needed = math.ceil(loader.num_workers * step / max(step - wait, step / 100) - 0.05)
    if saturated(evidence) is None and not loader.iterable and (raised := min(needed, cores)) > loader.num_workers:
        return f"raise num_workers from {loader.num_workers} to {raised}"
    return "make samples cheaper: keep them decoded, decode them smaller, or move work from the dataset to the GPU"


def _threads_spin(evidence: Evidence, loader: LoaderFacts) -> bool:
    """Return whether cores are busy only with threads that spin while they wait, so that workers could use them.

    OpenMP's threads spin between operations and look busy; the dataset probe on one thread tells them from work.
    """
    if loader.num_workers or loader.probe is None or loader.probe.fork_unsafe:
        return False
    return workers_for(evidence, loader).passive
