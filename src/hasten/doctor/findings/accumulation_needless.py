"""Gradients of several batches are added up before a step, although memory has room for a larger batch.

## Why it is slow

Accumulation gives the gradient of a large batch in the memory of a small one. Where memory is free it gives nothing:
each small batch pays again for launching kernels, the Python of a step, the exchange of gradients, and leaves cores
without work.

## How it is known

Batches and optimizer steps are counted. The larger batch's peak is an upper bound: all that was held at the peak, but
for weights and their gradients, is counted as if it grew with the batch, and it has to stay below 80 % of a GPU's
memory, or half of the machine's. How much faster the larger batch is was not measured: the finding is a note, and
`hasten batch` measures it.

## Example

```python
loader = DataLoader(dataset, batch_size=16)
for number, (images, labels) in enumerate(loader):
    (criterion(model(images), labels) / 4).backward()
    if (number + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
```

## Use instead

```python
loader = DataLoader(dataset, batch_size=64)
for images, labels in loader:
    optimizer.zero_grad()
    criterion(model(images), labels).backward()
    optimizer.step()
```

## When the repair is safe

Where the loss is a mean over samples: the gradient is the same but for rounding. BatchNorm sees the larger batch, and a
mean over tokens or over labelled samples weighs small batches as much as large ones under accumulation, and not in one
batch. Batches of one sample whose shapes differ cannot be joined, and are left alone.

## Source

- Wolf
- PyTorch performance tuning guide
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, Severity
from hasten.evidence.loaders import LoaderFacts
from hasten.evidence.weigh import on_gpu, peak_memory, weight_bytes

_FEWEST = 3  # optimizer steps from which their number says how many batches go into one
_ON_GPU, _ON_CPU = 0.8, 0.5  # of the memory: a GPU's is the training's alone


class AccumulationNeedless(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return at most one finding."""
        loader, added = evidence.train_loader, _batches_a_step(evidence)
        if loader is None or not loader.batch_size or added < 2 or _cannot_be_joined(evidence, loader):
            return None
        whole, peak = peak_memory(evidence)
        growing = peak - sum(weight_bytes(evidence))  # these are there at the peak, and do not grow with a batch
        if whole <= 0 or peak <= 0 or growing <= 0:
            return None
        share = _ON_GPU if on_gpu(evidence) else _ON_CPU
        most = int((share * whole - peak) / growing) + 1  # times the batch: each adds all that may grow
        if loader.samples:
            most = min(most, loader.samples // loader.batch_size)
        times = max(one for one in range(1, added + 1) if added % one == 0 and one <= max(1, most))
        if times < 2:
            return None
        larger, bound = times * loader.batch_size, peak + (times - 1) * growing
        rest = f" and add up {added // times}" if times < added else ", without accumulation"
        norms = sum(count for one in evidence.models for kind, count in one.layers.items() if "BatchNorm" in kind)
        return cls.finding(
            f"gradients of {added} batches of {loader.batch_size} are added up before each optimizer step, and memory "
            f"has room for {larger} at once: {bound / 2**30:.1f} of {whole / 2**30:.1f} GiB at most",
            f"use batches of {larger}{rest}, with the loss divided by as many; `hasten batch` says how fast that is",
            Severity.NOTE,
            place=loader.where,
            details=("BatchNorm would see the larger batch: results change by more than rounding",) if norms else (),
        )


def _batches_a_step(evidence: Evidence) -> int:
    """Return how many batches go into an optimizer step; 1 where that is not one number, or not known."""
    stepped = [one.steps for one in evidence.optimizers if one.steps]
    if evidence.step_of != "batch" or len(stepped) != 1 or stepped[0] < _FEWEST:
        return 1  # two that step in turn, as of a GAN, step once in two batches each
    early = [loss for place, loss in enumerate(evidence.losses) if evidence.number(place) < 200]  # all are kept there
    went_backward = sum(loss is not None for loss in early)
    return round(evidence.steps / stepped[0]) if went_backward >= 0.9 * len(early) else 1


def _cannot_be_joined(evidence: Evidence, loader: LoaderFacts) -> bool:
    """Whether batches are single samples of several shapes."""
    return loader.batch_size == 1 and (evidence.inputs is None or len(evidence.inputs.shapes) != 1)
