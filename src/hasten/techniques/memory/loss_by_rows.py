"""Cross entropy of existing logits, computed some rows at a time: no copy of all of them is kept for the backward.

The forward saves the logits themselves and one logsumexp per row. The backward computes softmax minus one-hot from
them, chunk by chunk, straight into the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_NUMBERS = 2**22  # elements in a chunk of logits: 16 MiB in float32


def by_rows(logits: Tensor, target: Tensor, ignore_index: int, reduction: str, dtype: torch.dtype) -> Tensor:
    """Return the loss that `F.cross_entropy` returns, except for rounding.

    Args:
        logits: (rows, classes).
        target: Class indices, (rows).
        ignore_index: Target of rows that do not count.
        reduction: "mean", "sum" or "none".
        dtype: Dtype of the result.
    """
    apply: Any = _ByRows.apply
    loss: Tensor = apply(logits, target, ignore_index, reduction)
    return loss.to(dtype)


class _ByRows(torch.autograd.Function):
    """Cross entropy that saves the logits and one number per row.

    Plain cross entropy saves their log-softmax, and its backward makes two tensors of that size.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
        counts = target != ignore_index
        index = target.where(counts, 0).unsqueeze(1)
        wide = torch.float32 if logits.dtype in (torch.bfloat16, torch.float16) else logits.dtype
        total = torch.empty(len(logits), dtype=wide, device=logits.device)
        for part in _parts(logits):
            total[part] = logits[part].to(wide).logsumexp(1)
        total[total == torch.inf] = torch.nan  # log_softmax gives NaN for a row with an infinite logit
        losses = (total - _picked(logits, index).squeeze(1).to(wide)).where(counts, 0)
        count = counts.sum()
        scale = (1 / count if reduction == "mean" else torch.ones((), device=logits.device)).to(wide)
        ctx.save_for_backward(logits, index, total, counts, scale)
        if reduction == "none":
            return losses
        return losses.sum() / count if reduction == "mean" else losses.sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "hasten: chunked_loss: a loss by rows cannot be differentiated twice (create_graph=True). Take "
                "chunked_loss out of the plan."
            )
        try:
            logits, index, total, counts, scale = ctx.saved_tensors
        except RuntimeError as error:  # the logits were changed in place after the loss
            error.add_note(
                "hasten: raised by the technique chunked_loss, which keeps the logits themselves where F.cross_entropy"
                " keeps a copy. Change them out of place, or take chunked_loss out of the plan."
            )
            raise
        # `where` comes after the multiplication: if no row counts, `scale` is infinite, and gradients must be 0, not
        # NaN.
        each = (grad_outputs[0].to(total.dtype) * scale).expand_as(total).where(counts, 0).unsqueeze(1)
        gradient = torch.empty_like(logits)
        for part in _parts(logits):
            chunk = (logits[part].to(total.dtype) - total[part].unsqueeze(1)).exp_()
            chunk.scatter_add_(1, index[part], torch.full_like(chunk[:, :1], -1.0))
            gradient[part] = chunk.mul_(each[part])
        return gradient, None, None, None


def _picked(logits: Tensor, index: Tensor) -> Tensor:
    """Return the logits of the targets.

    Raises:
        IndexError: A target is not a class, with F.cross_entropy's message. On a GPU it fails as torch's own does
        there.
    """
    try:
        return logits.gather(1, index)
    except RuntimeError as error:
        wrong = index[(index < 0) | (index >= logits.shape[1])] if logits.device.type == "cpu" else index[:0]
        if len(wrong):
            raise IndexError(f"Target {int(wrong[0])} is out of bounds.") from error
        raise


def _parts(logits: Tensor) -> list[slice]:
    """Return slices of rows, each of at most `_NUMBERS` elements, but of at least one row."""
    rows, size = logits.shape[0], max(1, _NUMBERS // logits.shape[1])
    return [slice(start, start + size) for start in range(0, rows, size)]
