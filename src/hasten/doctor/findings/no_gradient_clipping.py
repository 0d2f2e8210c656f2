"""A recurrent network trains without gradient clipping.

## Why it is slow

This costs no time. Gradients over many time steps can explode, and a single such batch ruins the weights.

## How it is known

From the layers and from calls that clip gradients. Jumps of the loss tell how much it matters.

## Example

```python
model = nn.LSTM(32, 64)
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x)[0], y)
    loss.backward()
    optimizer.step()
```

## Use instead

```python
model = nn.LSTM(32, 64)
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x)[0], y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
```

## When the repair is safe

The change affects only steps whose gradient norm exceeds the bound.

## Source

- Pascanu, Mikolov, Bengio, 2013
- Kuhn, tip 16
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

import libcst as cst

from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Problem
from hasten.doctor.source.syntax import last_name
from hasten.evidence import Evidence, Finding, Severity

_RECURRENT = ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell")
_RECURRENT_IN_CODE = frozenset(f"torch.nn.{kind}" for kind in _RECURRENT)


class NoGradientClipping(Rule):
    severity = Severity.NOTE

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding for a recurrent network, if the run was watched closely enough to see clipping."""
        if evidence.listened != "doctor" or not evidence.steps or evidence.events_of("clip"):
            return None
        stepping = [optimizer for optimizer in evidence.optimizers if optimizer.steps]
        if stepping and all(optimizer.name == "LBFGS" for optimizer in stepping):
            return None  # LBFGS estimates curvature from gradients, which clipping would distort
        layer_kinds = [kind for kind in _RECURRENT for model in evidence.models if kind in model.layers]
        if not layer_kinds:
            return None
        jumps = spikes(evidence)
        harm = (
            "losses were NaN or infinite" if evidence.bad_losses else f"the loss jumped {jumps} times" if jumps else ""
        )
        layer = next((layer for layer in evidence.layers if layer.kind in _RECURRENT), None)
        return cls.finding(
            f"a recurrent network ({layer_kinds[0]}) trains without gradient clipping{f', and {harm}' if harm else ''}",
            "call torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) between backward and the optimizer's step",
            Severity.MEDIUM if harm else Severity.NOTE,
            where=layer.path if layer else "",
        )

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find recurrent networks that this file trains without clipping."""
        # Any name with "clip" in it counts: `clip_grad_norm_`, an own `clip_gradients`, an option `args.clip`.
        clips = any("clip" in node.value for node in code.script.nodes if isinstance(node, cst.Name))
        recurrent = next(
            (call for call in code.script.calls if code.script.qualified(call.func) in _RECURRENT_IN_CODE), None
        )
        only_lbfgs = {last_name(call.func) for call in code.script.optimizers} == {"LBFGS"}
        if clips or recurrent is None or only_lbfgs:
            return
        for call in code.script.calls:
            if code.training.goes_backward(call) and code.training.in_step(call):
                yield Problem(
                    call,
                    f"a recurrent net ({last_name(recurrent.func)}, line {code.script.line(recurrent)}) trains without "
                    "gradient clipping",
                    "call torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) after backward()",
                )
                return


def spikes(evidence: Evidence) -> int:
    """Return how often a loss exceeded four times the median of the 20 losses before it."""
    losses = [loss for loss in evidence.losses if loss is not None and math.isfinite(loss)]
    return sum(
        losses[index] > 4 * middle > 0
        for index in range(20, len(losses))
        if (middle := statistics.median(losses[index - 20 : index])) > 0
    )
