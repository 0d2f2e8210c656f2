"""Logits of many classes are held several times over by their cross entropy.

## Why it is slow

A language model's logits (rows x classes) are often its largest tensor. `F.cross_entropy` keeps their log-softmax, and
its backward makes two more tensors of that size. The memory is missing for a larger batch, and all of it is written and
read again.

## How it is known

Cross entropies of 2 million logits or more are noted with their sizes. The finding is given where two copies are a
fifth of the peak or more.

## Example

```python
logits = head(hidden)  # 8192 x 50257: 1.6 GB
loss = F.cross_entropy(logits, targets)  # and three times as much again
```

## Use instead

```python
head = hasten.nn.ChunkedCrossEntropy(features, classes)  # in place of nn.Linear(features, classes)
loss = head(hidden, targets)  # logits of a few rows at a time
```

## When the repair is safe

The technique `chunked_loss` leaves the code as it is and saves two copies of the logits: `chunked_loss = true` in a
plan, `Trainer(chunked_loss=True)`. The layer above never holds logits at all. Loss and gradients are the same but for
rounding. The technique leaves class weights, label smoothing and probabilities as targets alone.

## Source

- Wolf
- Liger Kernel, arXiv 2410.10989
"""

from __future__ import annotations

import re

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, Severity
from hasten.evidence.figures import percent
from hasten.evidence.weigh import on_gpu, peak_memory
from hasten.techniques.memory.chunked_loss import ChunkedLoss

_LEAST = 0.2  # of the peak that two copies are
_FULL = 0.8  # of the memory: from here on it matters by itself


class LargeLogits(Rule):
    cure = ChunkedLoss

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return at most one finding, for the largest logits."""
        device = "cuda" if on_gpu(evidence) else "cpu"
        sizes = [(_bytes(event.detail), event) for event in evidence.events_of("large_loss") if event.device == device]
        size, event = max(sizes, key=lambda one: one[0], default=(0, None))
        whole, peak = peak_memory(evidence)
        if event is None or peak <= 0 or 2 * size < _LEAST * peak:
            return None
        return cls.finding(
            f"a cross entropy of {event.detail.partition(',')[0]} logits ({size / 2**20:.0f} MiB) holds two more"
            f" tensors of that size than it has to: {percent(min(1.0, 2 * size / peak))} of the peak,"
            f" {peak / 2**30:.1f} GiB",
            "compute it some rows at a time: `chunked_loss = true` in a plan, Trainer(chunked_loss=True), or"
            " hasten.nn.ChunkedCrossEntropy, which never holds all logits",
            Severity.MEDIUM if whole and peak >= _FULL * whole else Severity.NOTE,
            place=event.where,
            setting="true",
        )


def _bytes(detail: str) -> int:
    """Return the bytes of logits by what was noted of them: "8192 x 50257, 4"."""
    found = re.fullmatch(r"(\d+) x (\d+), (\d+)", detail)
    return int(found[1]) * int(found[2]) * int(found[3]) if found else 0
