"""A loader has more workers than the machine has cores.

## Why it is slow

Workers beyond the number of cores do not make batches faster. Each costs memory and has to be started for every epoch.

## How it is known

The measured pauses between `iter(loader)` and the first batch, minus the share that as many workers as cores would
need.

## Example

```python
loader = DataLoader(dataset, batch_size=64, num_workers=64)
```

## Use instead

```python
loader = DataLoader(dataset, batch_size=64, num_workers=os.cpu_count() - 1)
```

## When the repair is safe

Always. Random augmentation draws other numbers, since each worker has its own seed.

## Source

- torch.utils.data.DataLoader
- Kuhn, tip 2
"""

from __future__ import annotations

from collections.abc import Iterator

from hasten.doctor.figures import worker_startup_share
from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown, severity_of
from hasten.evidence.waiting import data_share, epoch_start, in_ms, mean_during, saturated

_CROWD = 0.25  # share of the cores that workers must use to count as slowing each other down


class TooManyWorkers(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding]:
        """Return a finding for each loader whose surplus workers cost start-up time or keep every core busy."""
        cores, busy = evidence.machine.cores, saturated(evidence)
        for loader in evidence.loaders:
            if loader.num_workers <= cores or loader.role == "unused":
                continue
            start = epoch_start(evidence, loader)
            worth = (
                worker_startup_share(evidence, loader, start) * (1 - cores / loader.num_workers)
                if start is not None
                else 0.0
            )
            working = mean_during(evidence, evidence.used.workers)
            # Without start-up cost, only twice the cores count, and only if all are busy and the step waits for data.
            full = busy is not None and data_share(evidence) >= 0.02
            if worth < 0.01 and not (full and loader.num_workers >= 2 * cores):
                continue
            pause = (
                f"; each epoch begins with {in_ms(start.pause)} of waiting for them" if worth >= 0.01 and start else ""
            )
            each_other = ", and they wait for each other" if (working or 0.0) >= _CROWD * cores else ""
            full_text = f"; no core is idle{each_other}" if full else ""
            yield cls.finding(
                f"{loader.num_workers} workers share {cores} cores{pause}{full_text}",
                f"give the loader num_workers={max(1, cores - 1)}",
                severity_of(worth),
                min(1.0, worth) if worth >= 0.01 else None,
                HowKnown.ESTIMATED,
                place=loader.where,
            )
