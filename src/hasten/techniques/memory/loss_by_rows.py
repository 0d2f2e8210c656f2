"""Cross entropy of logits that are there, some rows at a time: no copy of all of them is kept for the backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_NUMBERS = 2**22  # in a chunk of logits: 16 MiB in float32


def by_rows(logits: Tensor, target: Tensor, ignore_index: int, reduction: str, dtype: torch.dtype) -> Tensor:
    """Return what `F.cross_entropy` does, but for rounding.

    Args:
        logits: (rows, classes).
        target: Class indices, (rows).
        ignore_index: The target of rows that do not count.
        reduction: "mean", "sum" or "none".
        dtype: Of the result.
    """
    apply: Any = _ByRows.apply
    loss: Tensor = apply(logits, target, ignore_index, reduction)
    return loss.to(dtype)


class _ByRows(torch.autograd.Function):
    """Keeps the logits and one number a row; plain cross entropy keeps their log-softmax, and makes two gradients."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
        counts = target != ignore_index
        index = target.where(counts, 0).unsqueeze(1)
        wide = torch.float32 if logits.dtype in (torch.bfloat16, torch.float16) else logits.dtype
        total = torch.empty(len(logits), dtype=wide, device=logits.device)
        for part in _parts(logits):
            total[part] = logits[part].to(wide).logsumexp(1)
        total[total == torch.inf] = torch.nan  # as log_softmax makes of a row with an infinite logit
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
        except RuntimeError as error:  # changed in place behind the loss
            error.add_note(
                "hasten: raised by the technique chunked_loss, which keeps the logits themselves where F.cross_entropy"
                " keeps a copy. Change them out of place, or take chunked_loss out of the plan."
            )
            raise
        # Behind the division: where no row counts, gradients are 0 and not NaN.
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
        IndexError: A target is no class; in the words of F.cross_entropy. On a GPU it ends as torch's own does there.
    """
    try:
        return logits.gather(1, index)
    except RuntimeError as error:
        wrong = index[(index < 0) | (index >= logits.shape[1])] if logits.device.type == "cpu" else index[:0]
        if len(wrong):
            raise IndexError(f"Target {int(wrong[0])} is out of bounds.") from error
        raise


def _parts(logits: Tensor) -> list[slice]:
    rows, size = logits.shape[0], max(1, _NUMBERS // logits.shape[1])
    return [slice(start, start + size) for start in range(0, rows, size)]
