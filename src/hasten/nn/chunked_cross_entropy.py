"""Cross entropy of a linear layer's logits, computed a chunk of rows at a time, so that all logits never exist at once.

For "mean" and "sum" the gradient of the loss is known up to one factor before the backward. So the forward computes it
along with the loss, while a chunk's logits exist, and the backward only multiplies it. (The arithmetic is in `rows`.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hasten.errors import HastenError
from hasten.nn.rows import Gradients, RowLosses

_LOGITS = 2**23  # logits in a chunk: 32 MiB in float32, enough rows for a matrix product at full speed
_REDUCTIONS = ("mean", "sum", "none")


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """Return the cross entropy of `F.linear(hidden, weight, bias)`, of which only `chunk` rows exist at a time.

    The value and the gradients are those of `F.cross_entropy` on all logits, up to rounding. With "mean" and "sum",
    gradients are computed together with the loss, so that nothing is computed twice; "none" recomputes a chunk's logits
    in the backward. Under autocast, logits are in 16 bits and the rest is in float32, as without chunks.

    Args:
        hidden: Input of the linear layer, (..., features).
        weight: Weight of the linear layer, (classes, features); it may be tied to an embedding.
        target: Class indices, (...).
        bias: Bias of the linear layer, (classes).
        ignore_index: Target of rows to ignore.
        reduction: "mean" (over rows that are not ignored), "sum" or "none" (the shape of `target`).
        label_smoothing: Part of each target that is spread over all classes, 0 to 1.
        chunk: Rows per chunk; by default as many as make 32 MiB of logits in float32.

    Raises:
        HastenError: An argument is invalid, or gradients are differentiated again.

    Example:
        >>> hidden = torch.randn(4, 250, 64, requires_grad=True)
        >>> table = torch.randn(40_000, 64, requires_grad=True)
        >>> words = torch.randint(0, 40_000, (4, 250))
        >>> chunked_cross_entropy(hidden, table, words).backward()
    """
    _check(hidden, weight, target, bias, reduction, label_smoothing, chunk)
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    rows = RowLosses(
        ignore_index=ignore_index,
        smoothing=label_smoothing,
        size=chunk or max(1, _LOGITS // weight.shape[0]),
    )
    loss: Tensor = _loss_of(hidden.reshape(-1, hidden.shape[-1]), weight, target.reshape(-1), bias, rows, reduction)
    return loss.reshape(target.shape) if reduction == "none" else loss


class ChunkedCrossEntropy(nn.Module):
    """A linear layer and cross entropy on its logits, as one layer that never holds all logits.

    Args:
        features: Number of input features.
        classes: Number of classes.
        bias: Whether the linear layer has a bias.
        ignore_index: Target of rows to ignore. For this and the following see `chunked_cross_entropy`.
        reduction: "mean", "sum" or "none".
        label_smoothing: Part of each target that is spread over all classes.
        chunk: Rows per chunk; by default as many as make 32 MiB of logits in float32.
        device: Device of weight and bias.
        dtype: Dtype of weight and bias.

    Attributes:
        weight: (classes, features). `loss.weight = embedding.weight` ties it to an embedding.
        bias: (classes), or None.

    Example:
        >>> head = ChunkedCrossEntropy(64, 40_000, bias=False)
        >>> loss = head(torch.randn(8, 64), torch.randint(0, 40_000, (8,)))
        >>> guesses = head.logits(torch.randn(8, 64)).argmax(-1)
    """

    def __init__(
        self,
        features: int,
        classes: int,
        bias: bool = True,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        chunk: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        drawn = nn.Linear(features, classes, bias, device, dtype)  # initialized with the same random numbers
        self.weight, self.bias = drawn.weight, drawn.bias
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.chunk = label_smoothing, chunk

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        return chunked_cross_entropy(
            hidden,
            self.weight,
            target,
            self.bias,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            chunk=self.chunk,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return all logits, for inference."""
        return nn.functional.linear(hidden, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return the options that `print(model)` shows."""
        classes, features = self.weight.shape
        return f"{features}, {classes}, bias={self.bias is not None}, reduction={self.reduction!r}"


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    reduction: str,
    smoothing: float,
    chunk: int | None,
) -> None:
    """Raise a HastenError for an invalid argument, with a fix."""
    if reduction not in _REDUCTIONS:
        raise HastenError(f"reduction={reduction!r} is unknown", f"it must be one of {', '.join(_REDUCTIONS)}")
    if not 0.0 <= smoothing <= 1.0:
        raise HastenError(f"label_smoothing={smoothing} is not between 0 and 1")
    if chunk is not None and chunk < 1:
        raise HastenError(f"chunk={chunk!r} is no number of rows", "it must be a whole number of at least 1")
    if target.is_floating_point():
        raise HastenError("target holds probabilities", "give class indices, or use F.cross_entropy on the logits")
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise HastenError(
            f"hidden is {tuple(hidden.shape)} and weight {tuple(weight.shape)}",
            "they must be (..., features) and (classes, features)",
        )
    if hidden.shape[:-1] != target.shape:
        raise HastenError(
            f"hidden is {tuple(hidden.shape)} and target {tuple(target.shape)}",
            "each row of hidden needs one class index: target must be of hidden's shape without the last dimension",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise HastenError(f"bias is {tuple(bias.shape)}, and weight has {weight.shape[0]} classes")


class _ChunkedLoss(torch.autograd.Function):
    """Autograd function of the loss; for "mean" and "sum" the forward computes the gradients, up to one factor."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, rows: RowLosses, reduction: str
    ) -> Tensor:
        needs_grad = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]
        counts = target != rows.ignore_index
        scale = torch.ones_like(counts, dtype=rows.wide(hidden))
        if reduction == "mean":
            scale = scale / counts.sum()
        scale = scale.where(counts, 0)  # after the division: if all rows are ignored, gradients are 0, not NaN
        ahead = Gradients.like(hidden, weight, bias, needs_grad) if reduction != "none" and any(needs_grad) else None
        losses = rows.losses(hidden, weight, target, bias, ahead, scale)
        ctx.save_for_backward(hidden, weight, target, bias, scale)
        ctx.rows, ctx.needs_grad, ctx.ahead, ctx.reduction = rows, needs_grad, ahead, reduction
        if reduction == "none":
            return losses
        return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        if torch.is_grad_enabled():
            raise HastenError(
                "chunked_cross_entropy cannot be differentiated twice (create_graph=True)",
                "use F.cross_entropy on the logits where gradients are differentiated again",
            )
        gradients, ctx.ahead = ctx.ahead, None  # given to autograd: a second backward (retain_graph) recomputes them
        if gradients is None:
            hidden, weight, target, bias, scale = ctx.saved_tensors
            gradients = Gradients.like(hidden, weight, bias, ctx.needs_grad)
            ctx.rows.losses(hidden, weight, target, bias, gradients, scale * grad)
        else:
            gradients.multiply(grad)
        hidden_grad, weight_grad, bias_grad = gradients.in_input_dtypes()
        return hidden_grad, weight_grad, None, bias_grad, None, None


# torch.compile must not trace it: it is a loop over chunks that writes gradients in place. Compiled code calls it as
# is.
_loss_of: Any = torch.compiler.disable(_ChunkedLoss.apply)
