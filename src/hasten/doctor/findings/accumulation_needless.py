"""Gradients are accumulated over several batches although a larger batch would fit in memory.

## Why it is slow

Gradient accumulation gives the gradient of a large batch in the memory of a small one. Where memory is free it gains
nothing: each small batch pays again for kernel launches, the Python of a step and the gradient exchange, and leaves
cores idle.

## How it is known

hasten counts the batches and the optimizer steps. It bounds the larger batch's peak memory from above: everything held
at the peak except weights and their gradients is assumed to grow with the batch. This bound must stay below 80 % of
the GPU's memory, or below half of the machine's memory on a CPU. The speed of the larger batch is not measured, so the
finding is a note; `hasten batch` measures it.

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

Safe where the loss is a mean over samples: the gradient is the same except for rounding. Two cases change results.
BatchNorm normalises over the larger batch. A mean over tokens or over labelled samples gives every small batch the
same weight under accumulation, but not in one large batch. Batches of one sample whose shapes differ cannot be joined
and are not reported.

## Source

- Wolf
- PyTorch performance tuning guide
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, Severity
from hasten.evidence.loaders import LoaderFacts
from hasten.evidence.weigh import on_gpu, peak_memory, weight_bytes

_FEWEST = 3  # optimizer steps needed before their count tells how many batches go into each
# Share of the memory that the larger batch may fill: a GPU's memory is the training's alone, a machine's is shared.
_ON_GPU, _ON_CPU = 0.8, 0.5


class AccumulationNeedless(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if a larger batch fits in memory and replaces at least part of the accumulation."""
        loader, added = evidence.train_loader, _batches_a_step(evidence)
        if loader is None or not loader.batch_size or added < 2 or _cannot_be_joined(evidence, loader):
            return None
        total, peak = peak_memory(evidence)
        # Weights and gradients do not grow with the batch. What else was held at the peak might, so count all of it.
        growing = peak - sum(weight_bytes(evidence))
        if total <= 0 or peak <= 0 or growing <= 0:
            return None
        share = _ON_GPU if on_gpu(evidence) else _ON_CPU
        fitting = int((share * total - peak) / growing) + 1  # batches that fit: each further one adds `growing`
        if loader.samples:
            fitting = min(fitting, loader.samples // loader.batch_size)
        # Join a divisor of the accumulated batches, so that an optimizer step still sees the same number of samples.
        factor = max(divisor for divisor in range(1, added + 1) if added % divisor == 0 and divisor <= max(1, fitting))
        if factor < 2:
            return None
        larger, bound = factor * loader.batch_size, peak + (factor - 1) * growing
        rest = f" and add up {added // factor}" if factor < added else ", without accumulation"
        norms = sum(count for model in evidence.models for kind, count in model.layers.items() if "BatchNorm" in kind)
        return cls.finding(
            f"gradients of {added} batches of {loader.batch_size} are added up before each optimizer step, and memory "
            f"has room for {larger} at once: {bound / 2**30:.1f} of {total / 2**30:.1f} GiB at most",
            f"use batches of {larger}{rest}, with the loss divided by as many; `hasten batch` says how fast that is",
            Severity.NOTE,
            place=loader.where,
            details=("BatchNorm would see the larger batch: results change by more than rounding",) if norms else (),
        )


def _batches_a_step(evidence: Evidence) -> int:
    """Return the number of batches per optimizer step; 1 if it is unknown or if several optimizers step."""
    stepped = [optimizer.steps for optimizer in evidence.optimizers if optimizer.steps]
    # Two optimizers that take turns (a GAN) step once in two batches each, without any accumulation.
    if evidence.step_of != "batch" or len(stepped) != 1 or stepped[0] < _FEWEST:
        return 1
    # Only the first 200 losses are kept without gaps. A batch without a loss had no backward: dividing the number of
    # batches by that of optimizer steps would then count skipped batches as accumulated ones.
    early = [loss for index, loss in enumerate(evidence.losses) if evidence.number(index) < 200]
    went_backward = sum(loss is not None for loss in early)
    # Rounded: a GradScaler skips some optimizer steps.
    return round(evidence.steps / stepped[0]) if went_backward >= 0.9 * len(early) else 1


def _cannot_be_joined(evidence: Evidence, loader: LoaderFacts) -> bool:
    """Return whether batches are single samples of several, or unknown, shapes."""
    return loader.batch_size == 1 and (evidence.inputs is None or len(evidence.inputs.shapes) != 1)
