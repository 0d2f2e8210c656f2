"""Gradients are computed for parameters that no optimizer updates.

## Why it is slow

A backbone that was meant to be frozen still runs its whole backward.

## How it is known

Parameters that hold a gradient after many steps but have not changed, and the measured time of their layers. Before
the first trained layer none of the backward is needed. After it half of the backward is needed, the part for the
layers' inputs.

## Example

```python
optimizer = torch.optim.AdamW(model.head.parameters())
```

## Use instead

```python
model.backbone.requires_grad_(False)
optimizer = torch.optim.AdamW(model.head.parameters())
```

## When the repair is safe

Safe where nothing reads those gradients. A gradient norm over all parameters does read them.

## Source

- PyTorch, Autograd mechanics
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown, Phase
from hasten.evidence.weigh import seconds_of, share_of

# Sizes that only layers with weights have: an activation or pooling layer is neither trained nor frozen.
_WEIGHTED = {"in_features", "in_channels", "num_embeddings", "input_size", "num_heads"}


class UnusedGradients(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return one finding for all layers whose gradients no optimizer uses."""
        strays = [layer for layer in evidence.layers if layer.path in evidence.strays]
        total = sum(layer.seconds for layer in evidence.layers)
        if not strays or not total:
            return None
        weighted = [number for number, layer in enumerate(evidence.layers) if _WEIGHTED & set(layer.sizes)]
        trained = [number for number in weighted if evidence.layers[number] not in strays]
        leading = evidence.layers[: trained[0] if trained else None]
        # Before the first trained layer the whole backward is wasted. After it a stray layer must still compute the
        # gradient of its input, so only that of its weights, about half of the work, is wasted.
        wasted = sum(layer.seconds for layer in leading)
        wasted += sum(layer.seconds for layer in strays if layer not in leading) / 2
        first, others = strays[0], f" and {len(strays) - 1} more" if len(strays) > 1 else ""
        # Only whole leading layers can run under no_grad: layers after the first trained one must pass gradients on.
        no_grad_tip = ", and call it under torch.no_grad()" if len(leading) > 1 and first in leading else ""
        return cls.timed(
            f"layers get gradients in each backward, and no optimizer has their parameters: {first.path}{others}",
            f"freeze them: `for p in part.parameters(): p.requires_grad_(False)`{no_grad_tip}; eval() alone does not",
            share_of(evidence, seconds_of(evidence, Phase.BACKWARD)) * wasted / total,
            HowKnown.ESTIMATED,
            place=first.where,
            where=first.path,
        )
