"""Each batch looks up few rows of an embedding table, but the gradient of the whole table is computed and applied.

## Why it is slow

The gradient of an embedding is a tensor of the table's size. It is filled with zeros, and the optimizer reads and
writes the whole table, although only a few rows changed.

## How it is known

The measured time of the table's backward, plus the table's share of the optimizer's time. It is an upper bound: the
rows that a batch looks up must still be updated.

## Example

```python
items = nn.Embedding(1_000_000, 64)
optimizer = torch.optim.Adam(items.parameters())
```

## Use instead

```python
items = nn.Embedding(1_000_000, 64, sparse=True)
optimizer = torch.optim.SparseAdam(items.parameters())
```

## When the repair is safe

Safe with optimizers that accept sparse gradients (SGD, SparseAdam, Adagrad). Moments and weight decay then change only
for rows that were looked up, so training with Adam takes another path.

## Source

- PyTorch, nn.Embedding
"""

from __future__ import annotations

import math

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown, Layer, Phase
from hasten.evidence.weigh import seconds_of, share_of

_MANY_ROWS, _FEW_OF_THEM = 10_000, 0.2  # rows that make a table large; share of them that counts as few


class DenseEmbeddingGradients(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return one finding for all large tables of which batches use few rows, placed at the largest."""
        operators = evidence.sampled.operators if evidence.sampled is not None else ()
        backward = sum(operator.seconds for operator in operators if operator.name.endswith("embedding_dense_backward"))
        sizes = [math.prod(shape) for optimizer in evidence.optimizers for shape in optimizer.shapes]
        tables = [layer for layer in evidence.layers if layer.kind == "Embedding" and _rows(layer) >= _MANY_ROWS]
        rare = [layer for layer in tables if _looked_up(layer) <= _FEW_OF_THEM * _rows(layer)]
        if not rare or backward <= 0 or not sum(sizes):
            return None
        table = max(rare, key=_numbers)
        numbers = sum(map(_numbers, rare))
        optimizer = seconds_of(evidence, Phase.OPTIMIZER) * min(1.0, numbers / sum(sizes))
        # The profiler has one time for all tables: count the part of those with few rows in use, by size.
        share = numbers / max(1, sum(map(_numbers, tables)))
        return cls.timed(
            f"a batch looks up {_looked_up(table):,.0f} of the {_rows(table):,} rows of {table.path}, and the gradient "
            "of all of them is made and applied in each step",
            "build it with sparse=True, and give its weights an optimizer that takes sparse gradients: SGD without "
            "momentum, Adagrad or SparseAdam (rows that are not looked up then rest, their momentum too)",
            share_of(evidence, share * backward + optimizer),
            HowKnown.ESTIMATED,
            place=table.where,
            where=table.path,
        )


def _rows(layer: Layer) -> int:
    """Return the number of rows of an embedding table; 0 for other layers."""
    return layer.sizes.get("num_embeddings", 0)


def _numbers(layer: Layer) -> int:
    """Return the number of weights in an embedding table."""
    return _rows(layer) * layer.sizes.get("embedding_dim", 0)


def _looked_up(layer: Layer) -> float:
    """Return the rows looked up per step, at most: a batch may look up the same row several times."""
    return math.prod(layer.shape) * max(1.0, layer.calls)
