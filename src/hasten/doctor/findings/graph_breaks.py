"""torch.compile breaks the graph at a line that it cannot compile.

## Why it is slow

Each break returns to Python once more, and nothing is fused across it.

## How it is known

torch's own list of graph breaks. The cost of a break is an estimate of its overhead; what fusion across it would save
is not known.

## Example

```python
@torch.compile
def forward(x):
    y = x.relu()
    print(y.shape)
    return y.sum()
```

## Use instead

```python
@torch.compile
def forward(x):
    return x.relu().sum()
```

## When the repair is safe

Move the line out of the compiled code. `torch.compile(model, fullgraph=True)` shows every such place.

## Source

- torch.compile, graph breaks
"""

from __future__ import annotations

from collections.abc import Iterator

from hasten.doctor.figures import by_place, first_line_of
from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown, severity_of
from hasten.evidence.weigh import LEAST, share_of

_BREAK = 100e-6  # seconds that a graph break costs per step, forward and backward: an estimate


class GraphBreaks(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding]:
        """Return a finding for each line that breaks the graph."""
        reasons = evidence.sampled.graph_breaks if evidence.sampled else ()
        worth = share_of(evidence, _BREAK)
        known_worth = worth if worth >= LEAST else None
        for place, reasons_there in by_place(reasons).items():
            yield cls.finding(
                f"torch.compile leaves its graph here: {first_line_of(reasons_there[0], place)}",
                "move it out of the compiled code (torch.compile(model, fullgraph=True) shows every place)",
                severity_of(known_worth), known_worth, HowKnown.ESTIMATED,
                place=place,
                details=reasons_there,
            )  # fmt: skip
