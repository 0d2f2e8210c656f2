"""Memory is nearly full.

## Why it is slow

The next larger batch ends the training with an out-of-memory error. On a GPU, torch starts to free its cache and
allocate again, repeatedly, long before that.

## How it is known

Peak memory: what torch had allocated on the GPU, and what the training process held of the machine's memory.

## Example

```python
loss = criterion(model(images), labels)
```

## Use instead

```python
with torch.autocast("cuda", torch.bfloat16):
    loss = criterion(model(images), labels)
```

## When the repair is safe

16-bit dtypes change results by rounding. These techniques keep results the same: `activation_checkpointing` (blocks
are recomputed in the backward), `activation_offload` (activations are kept in the host's memory) and
`optimizer_in_backward` (each gradient is dropped once its parameter has been updated). `hasten tune --memory SIZE`
finds the fastest plan that leaves room. `host_embeddings` keeps embedding tables, their gradients and their optimizer
state in the host's memory; it changes results by rounding.

## Source

- PyTorch, CUDA semantics, memory management
"""

from __future__ import annotations

from collections.abc import Iterator

from hasten.doctor.rule import Rule
from hasten.errors import HastenError
from hasten.evidence import Evidence, Finding, Layer, Severity
from hasten.evidence.weigh import on_gpu, peak_memory, weight_bytes
from hasten.planner.job import numbers_kept

_LARGE = 0.15  # share of the peak from which gradients, optimizer state and the like are named


class MemoryNearlyFull(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding]:
        """Return a finding for a full GPU and one for a full machine."""
        total, peak = peak_memory(evidence)
        if on_gpu(evidence) and total and peak >= 0.92 * total:
            yield cls.finding(
                f"the training held {peak / 2**30:.1f} of the GPU's {total / 2**30:.1f} GiB at its peak",
                "leave it some room: activation checkpointing, bf16-mixed precision, or a smaller batch with "
                "accumulated gradients; `hasten tune --memory` tries what is cheapest",
                Severity.MEDIUM,
                details=_shares_of(evidence, peak),
            )
        memory = evidence.machine.memory_bytes
        process_peak = max([evidence.peak_memory_bytes, *evidence.used.main_rss])
        if memory and process_peak >= 0.9 * memory:
            yield cls.finding(
                f"the process held {process_peak / 2**30:.1f} of the machine's {memory / 2**30:.1f} GiB at its peak",
                "keep less in memory: map files (numpy.memmap, Arrow) in place of reading them whole, fewer workers "
                "that each hold a copy",
                Severity.MEDIUM,
                details=() if on_gpu(evidence) else _shares_of(evidence, process_peak),
            )


def _shares_of(evidence: Evidence, peak: int) -> tuple[str, ...]:
    """Return a sentence for each large part of the peak (gradients, optimizer state, ...) and how to shrink it."""
    weights, gradients = weight_bytes(evidence)
    sentences = []
    if gradients >= _LARGE * peak:
        sentences.append(
            f"gradients are {gradients / 2**30:.1f} GiB of it: the technique optimizer_in_backward drops each as soon"
            " as its parameter is stepped"
        )
    try:
        state_tensors = max(
            (numbers_kept(optimizer) for optimizer in evidence.optimizers if optimizer.steps), default=0
        )
    except HastenError:  # an unknown optimizer: the size of its state is not known
        state_tensors = 0
    states = state_tensors * gradients
    if states >= _LARGE * peak:
        sentences.append(
            f"the optimizer's state is about {states / 2**30:.1f} GiB of it: optimizers with states of 8 bits (torchao,"
            " bitsandbytes) keep a quarter of that, and train to another result"
        )
    tables = (2 + state_tensors) * sum(map(_table_bytes, evidence.layers))  # weights, gradients and state
    if on_gpu(evidence) and tables >= _LARGE * peak:
        sentences.append(
            f"embedding tables, with gradients and the optimizer's state, are about {tables / 2**30:.1f} GiB of it: the"
            " technique host_embeddings keeps them in the host's memory"
        )
    rest = peak - weights - gradients - states
    if on_gpu(evidence) and rest >= _LARGE * peak:  # on a CPU the rest may also be the script's data
        sentences.append(
            f"about {rest / 2**30:.1f} GiB of it are neither weights nor gradients nor the optimizer's state, so mostly"
            " activations: the technique activation_checkpointing computes those of repeated blocks again,"
            " activation_offload keeps them in the host's memory"
        )
    return tuple(sentences)


def _table_bytes(layer: Layer) -> int:
    """Return the bytes of an embedding's weight in float32; 0 for other layers."""
    return 4 * layer.sizes.get("num_embeddings", 0) * layer.sizes.get("embedding_dim", 0)
