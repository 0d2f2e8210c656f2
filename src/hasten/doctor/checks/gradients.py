"""Gradients that are computed for nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hasten.doctor.checks.base import Check
from hasten.evidence import Evidence, Finding, HowKnown, Layer, Phase
from hasten.evidence.weigh import seconds_of, share_of, timed

_MANY_ROWS, _FEW_OF_THEM = 10_000, 0.2  # rows from which a table counts as great; share of them that is few
_WEIGHTED = {"in_features", "in_channels", "num_embeddings", "input_size", "num_heads"}  # sizes of what has weights


class UnusedGradients(Check):
    """Gradients computed for parameters that no optimizer moves: a backbone that was meant to be frozen.

    Rests on parameters that hold a gradient after many steps and were not changed meanwhile, and on the measured time
    of their layers. Before the first layer that is trained nothing of the backward is needed; behind it half of it is,
    that of the layer's inputs (PyTorch, Autograd mechanics: locally disabling gradient computation).
    """

    name = "unused_gradients"
    sources = ("PyTorch, Autograd mechanics",)

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One for all of them."""
        strays = [layer for layer in evidence.layers if layer.path in evidence.strays]
        total = sum(layer.seconds for layer in evidence.layers)
        if not strays or not total:
            return
        weighted = [number for number, layer in enumerate(evidence.layers) if _WEIGHTED & set(layer.sizes)]
        trained = [number for number in weighted if evidence.layers[number] not in strays]
        before = evidence.layers[: trained[0] if trained else None]
        wasted = sum(layer.seconds for layer in before)
        wasted += sum(layer.seconds for layer in strays if layer not in before) / 2
        first, more = strays[0], f" and {len(strays) - 1} more" if len(strays) > 1 else ""
        under = ", and call it under torch.no_grad()" if len(before) > 1 and first in before else ""
        finding = timed(
            cls.name,
            f"layers get gradients in each backward, and no optimizer has their parameters: {first.path}{more}",
            f"freeze them: `for p in part.parameters(): p.requires_grad_(False)`{under}; eval() alone does not",
            share_of(evidence, seconds_of(evidence, Phase.BACKWARD)) * wasted / total,
            HowKnown.ESTIMATED,
            place=first.where,
            where=first.path,
            sources=cls.sources,
        )
        if finding is not None:
            yield finding


class DenseEmbeddingGradients(Check):
    """A table of which each batch looks up few rows, and whose gradient is made and applied whole.

    Rests on the measured time of the table's backward, and on its part of the optimizer's; the rows a batch looks up
    still have to be moved (PyTorch, nn.Embedding: sparse).
    """

    name = "dense_embedding_gradients"
    sources = ("PyTorch, nn.Embedding",)

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One for all tables, placed at the greatest."""
        operators = evidence.sampled.operators if evidence.sampled is not None else ()
        backward = sum(one.seconds for one in operators if one.name.endswith("embedding_dense_backward"))
        moved = [math.prod(shape) for optimizer in evidence.optimizers for shape in optimizer.shapes]
        tables = [layer for layer in evidence.layers if layer.kind == "Embedding" and _rows(layer) >= _MANY_ROWS]
        rare = [layer for layer in tables if _looked_up(layer) <= _FEW_OF_THEM * _rows(layer)]
        if not rare or backward <= 0 or not sum(moved):
            return
        table = max(rare, key=_numbers)
        numbers = sum(map(_numbers, rare))
        optimizer = seconds_of(evidence, Phase.OPTIMIZER) * min(1.0, numbers / sum(moved))
        share = numbers / max(1, sum(map(_numbers, tables)))
        finding = timed(
            cls.name,
            f"a batch looks up {_looked_up(table):,.0f} of the {_rows(table):,} rows of {table.path}, and the gradient "
            "of all of them is made and applied in each step",
            "build it with sparse=True, and give its weights an optimizer that takes sparse gradients: SGD without "
            "momentum, Adagrad or SparseAdam (rows that are not looked up then rest, their momentum too)",
            share_of(evidence, share * backward + optimizer),
            HowKnown.ESTIMATED,
            place=table.where,
            where=table.path,
            sources=cls.sources,
        )
        if finding is not None:
            yield finding


def _rows(layer: Layer) -> int:
    return layer.sizes.get("num_embeddings", 0)


def _numbers(layer: Layer) -> int:
    return _rows(layer) * layer.sizes.get("embedding_dim", 0)


def _looked_up(layer: Layer) -> float:
    """Rows per step at the most: a batch may ask for one several times."""
    return math.prod(layer.shape) * max(1.0, layer.calls)


CHECKS = (UnusedGradients, DenseEmbeddingGradients)
