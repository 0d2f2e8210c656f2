"""Cross entropy holds the logits of many classes several times over.

## Why it is slow

The logits of a language model (rows x classes) are often its largest tensor. `F.cross_entropy` keeps their
log-softmax, and its backward creates two more tensors of that size. This memory is not available for a larger batch,
and all of it is written and read again.

## How it is known

hasten records cross entropies of 2 million logits or more with their sizes. They are reported where two copies take a
fifth of the peak memory or more.

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

The technique `chunked_loss` changes no code and saves two copies of the logits: `chunked_loss = true` in a plan, or
`Trainer(chunked_loss=True)`. The layer above never holds all logits at once. Loss and gradients are the same except
for rounding. The technique skips losses with class weights, label smoothing or probabilities as targets.

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

_LEAST = 0.2  # share of the peak memory that two copies must take
_FULL = 0.8  # share of the memory from which a high peak is a problem as such


class LargeLogits(Rule):
    cure = ChunkedLoss

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return at most one finding, for the largest logits."""
        device = "cuda" if on_gpu(evidence) else "cpu"
        sizes = [(_bytes(event.detail), event) for event in evidence.events_of("large_loss") if event.device == device]
        size, event = max(sizes, key=lambda pair: pair[0], default=(0, None))
        total, peak = peak_memory(evidence)
        if event is None or peak <= 0 or 2 * size < _LEAST * peak:
            return None
        return cls.finding(
            f"a cross entropy of {event.detail.partition(',')[0]} logits ({size / 2**20:.0f} MiB) holds two more"
            f" tensors of that size than it has to: {percent(min(1.0, 2 * size / peak))} of the peak,"
            f" {peak / 2**30:.1f} GiB",
            "compute it some rows at a time: `chunked_loss = true` in a plan, Trainer(chunked_loss=True), or"
            " hasten.nn.ChunkedCrossEntropy, which never holds all logits",
            Severity.MEDIUM if total and peak >= _FULL * total else Severity.NOTE,
            place=event.where,
            setting="true",
        )


def _bytes(detail: str) -> int:
    """Return the bytes of the logits that an event's detail describes ("8192 x 50257, 4"); 0 if it does not."""
    match = re.fullmatch(r"(\d+) x (\d+), (\d+)", detail)
    return int(match[1]) * int(match[2]) * int(match[3]) if match else 0
