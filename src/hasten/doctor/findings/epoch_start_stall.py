"""Each epoch begins with a wait for its first batch, which a single worker makes.

## Why it is slow

With n workers, batches arrive n times as fast as one worker makes them. The first batch of an epoch takes the full
time of one worker, since all workers start at once.

## How it is known

The measured waits for first batches compared with those for ordinary batches.

## Example

```python
loader = DataLoader(dataset, batch_size=64, num_workers=8)
for epoch in range(100):
    for images, labels in loader:
        train(images, labels)
```

## Use instead

```python
loader = timm.data.loader.MultiEpochsDataLoader(dataset, batch_size=64, num_workers=8, persistent_workers=True)
for epoch in range(100):
    for images, labels in loader:
        train(images, labels)
```

## When the repair is safe

Safe where samples do not depend on anything that happens between epochs: workers make the next epoch's first batches
before the current epoch has ended.

## Source

- timm, MultiEpochsDataLoader
- PyTorch #15849
"""

from __future__ import annotations

from hasten.doctor.figures import BOUND, making_seconds
from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.waiting import data_share, epoch_start, in_ms, ordinary_seconds, ordinary_wait, stages_of


class EpochStartStall(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return at most one finding, for the training loader."""
        loader = evidence.train_loader
        start = epoch_start(evidence, loader) if loader is not None and loader.num_workers > 1 else None
        if loader is None or start is None:
            return None
        # Without persistent workers the pause includes their start, so other evidence must tell how long a batch takes.
        batch_time_known = (
            loader.persistent_workers or stages_of(evidence, loader) is not None or data_share(evidence) >= BOUND
        )
        making = start.pause if loader.persistent_workers else making_seconds(evidence, loader, start.waiting)
        if not batch_time_known or making < 2 * ordinary_seconds(evidence):
            return None
        return cls.timed(
            f"each epoch begins with a wait of {in_ms(making)} for its first batch, on which one of "
            f"{loader.num_workers} workers works alone; later ones come every {in_ms(ordinary_seconds(evidence))}",
            "let the workers go on into the next epoch while this one ends: an endless sampler and "
            "persistent_workers=True (as timm's MultiEpochsDataLoader), or fewer, longer epochs",
            (making - ordinary_wait(evidence)) / start.epoch,
            HowKnown.MEASURED if loader.persistent_workers else HowKnown.ESTIMATED,
            place=loader.where,
            details=(f"measured over {start.passes} passes after the first",),
        )
