"""Tells a loss that is a sum over the batch from one that is a mean: ranks' gradients are averaged."""

from __future__ import annotations

from typing import Any

_PASSING = {"AddBackward0", "SubBackward0", "NegBackward0", "CloneBackward0", "ToCopyBackward0", "SqueezeBackward0"}
_SUM = 2  # torch's number for reduction="sum"
_MOST = 100  # nodes looked at


def sum_over_batch(loss: Any, samples: int) -> str:
    """Name what sums the loss up over the batch; "" if nothing does, as far as its graph shows.

    Looks at the last operations only, through additions: `F.mse_loss(a, b, reduction="sum") + penalty`. A sum that is
    divided afterwards (`loss.sum() / len(x)`) may be a mean.

    Args:
        loss: What backward is called on.
        samples: In this rank's batch.
    """
    left, looked = [getattr(loss, "grad_fn", None)], 0
    while left and looked < _MOST:
        node = left.pop()
        looked += 1
        if node is None:
            continue
        name = node.name()
        if name in _PASSING:
            left += [function for function, _ in node.next_functions]
        elif getattr(node, "_saved_reduction", None) == _SUM:
            return f"{name.removesuffix('Backward0')} with reduction='sum'"
        elif name == "SumBackward0" and samples > 1 and list(node._saved_self_sym_sizes)[:1] == [samples]:
            return "sum()"
    return ""
