"""Sequences of different lengths share a batch and are padded to the longest one.

## Why it is slow

Padding is computed like any other token and then discarded.

## How it is known

The measured share of padding in the batches.

## Example

```python
loader = DataLoader(sentences, batch_size=64, shuffle=True, collate_fn=pad)
```

## Use instead

```python
loader = DataLoader(sentences, batch_sampler=ByLength(sentences, batch_size=64), collate_fn=pad)
```

## When the repair is safe

The change alters which samples share a batch: shuffle within groups of similar length, and shuffle the groups.

## Source

- torchtext, BucketIterator
- Hugging Face Trainer, group_by_length
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.figures import percent
from hasten.evidence.weigh import COMPUTE, seconds_of, share_of


class RaggedBatches(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if 10 % of the tokens or more are padding.

        The worth is the padding's share of forward and backward, minus a fifth that remains among similar lengths.
        """
        inputs = evidence.inputs
        if inputs is None or inputs.padding < 0.1 or "int" not in inputs.dtype or not _reads_tokens(evidence):
            return None
        longest = max((shape[1] for shape, _ in inputs.shapes if len(shape) == 2), default=0)
        if longest < 8:
            return None
        lengths = len({shape[1:] for shape, _ in inputs.shapes})
        varying = f", in batches of {lengths} lengths" if lengths > 1 else f", all batches {longest} long"
        return cls.timed(
            f"{percent(inputs.padding)} of the tokens are padding{varying}",
            "batch sequences of like length (a batch sampler that sorts within a large window), padded to the longest "
            "of their batch",
            0.8 * inputs.padding * share_of(evidence, seconds_of(evidence, *COMPUTE)),
            HowKnown.ESTIMATED,
            place=evidence.train_loader.where if evidence.train_loader else "",
        )


def _reads_tokens(evidence: Evidence) -> bool:
    """Return whether the model embeds integers; in a model without an embedding they are not tokens."""
    return any("Embedding" in layer for model in evidence.models for layer in model.layers)
