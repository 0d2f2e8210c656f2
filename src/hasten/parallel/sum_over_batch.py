"""Detect losses that are a sum over the batch: ranks' gradients are averaged, which is right for a mean only."""

from __future__ import annotations

from typing import Any

# Operations that keep a sum a sum.
_PASSING = {"AddBackward0", "SubBackward0", "NegBackward0", "CloneBackward0", "ToCopyBackward0", "SqueezeBackward0"}
_SUM = 2  # torch's number for reduction="sum"
_MOST_NODES = 100  # nodes to visit


def sum_over_batch(loss: Any, samples: int) -> str:
    """Return the name of the operation that sums the loss over the batch; "" if the graph shows none.

    Follows the graph backwards only through operations that keep a sum a sum, such as the addition in
    `F.mse_loss(a, b, reduction="sum") + penalty`. A sum that is divided afterwards (`loss.sum() / len(x)`) may be a
    mean, and is not reported.

    Args:
        loss: The tensor that backward is called on.
        samples: Number of samples in this rank's batch.
    """
    pending, visited = [getattr(loss, "grad_fn", None)], 0
    while pending and visited < _MOST_NODES:
        node = pending.pop()
        visited += 1
        if node is None:
            continue
        name = node.name()
        if name in _PASSING:
            pending += [function for function, _ in node.next_functions]
        elif getattr(node, "_saved_reduction", None) == _SUM:
            return f"{name.removesuffix('Backward0')} with reduction='sum'"
        elif name == "SumBackward0" and samples > 1 and list(node._saved_self_sym_sizes)[:1] == [samples]:
            return "sum()"
    return ""
