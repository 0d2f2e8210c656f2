"""Tensors in memory are fetched sample by sample.

## Why it is slow

A TensorDataset indexes each sample separately and the loader stacks the samples again: thousands of small calls, where
a single index with the batch's sample numbers gives the same batch.

## How it is known

The measured wait for a batch of a TensorDataset, minus the time to gather the batch's bytes at once.

## Example

```python
loader = DataLoader(TensorDataset(images, labels), batch_size=512, shuffle=True)
```

## Use instead

```python
for index in torch.randperm(len(images)).split(512):
    train(images[index], labels[index])
```

## When the repair is safe

Always. The technique `batched_fetch` does it without a change of the script, in the same order and bit-identical.

## Source

- Lin, tip 3
- fastai #3949
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.waiting import in_ms, ordinary_wait
from hasten.evidence.weigh import share_of
from hasten.techniques.data.batched_fetch import BatchedFetch

_GATHERED = 80e-6  # seconds per batch: the loader's own overhead, and one index_select per tensor (26 us measured)
_BYTES = 2e9  # bytes per second that one core copies


class SampleBySample(Rule):
    cure = BatchedFetch

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if the training loader stacks samples of tensors in memory and is waited for."""
        loader = evidence.train_loader
        if loader is None or not loader.default_collate or loader.iterable:
            return None
        if loader.dataset != "TensorDataset" and not (loader.probe is not None and loader.probe.in_memory):
            return None
        wait = ordinary_wait(evidence)
        workers = " and passed on by workers" if loader.num_workers else ""
        return cls.timed(
            f"tensors that lie in memory are fetched sample by sample and stacked{workers}: {in_ms(wait)} for each "
            f"batch of {loader.batch_size or 'so many'}",
            "gather each batch at once: `for rows in torch.randperm(len(x)).split(batch_size): batch = x[rows], "
            "y[rows]`, or the technique batched_fetch"
            + (", with num_workers=0" if workers else ", which leaves the script as it is"),
            share_of(evidence, wait - _GATHERED - loader.batch_bytes / _BYTES),
            HowKnown.ESTIMATED,
            place=loader.where,
            setting="true",
        )
