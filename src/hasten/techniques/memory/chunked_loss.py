"""Cross entropy of many classes, some rows at a time."""

from __future__ import annotations

import weakref
from typing import Any

from hasten.evidence import Evidence
from hasten.techniques.base import Choices, Effect, Refusal, Resource
from hasten.techniques.replaced import Replaced, Replacements
from hasten.techniques.switches import Stepwise

_LEAST = 2**21  # numbers of logits: of fewer there is little to save

_acting: weakref.WeakSet[Any] = weakref.WeakSet()


class ChunkedLoss(Stepwise):
    """Compute large cross entropies some rows at a time, so that logits have one copy less and one gradient less.

    `F.cross_entropy` and `nn.CrossEntropyLoss` keep the log-softmax of all logits, and their backward makes two
    tensors of that size; by rows the logits themselves and their gradient are all there is. The value and gradients are
    the same but for rounding. It acts on logits of two dimensions with class indices, from 2 million numbers on;
    class weights, label smoothing, probabilities as targets, and compiled code are left as they are. Logits that are
    changed in place behind the loss, and gradients of gradients, end in an error. A script that leaves its
    logits to `hasten.nn.ChunkedCrossEntropy` never holds them at all.
    """

    name = "chunked_loss"
    effect = Effect.ROUNDING
    relieves = Resource.MEMORY
    sources = ("Wolf", "Liger Kernel, arXiv 2410.10989")
    acts_on = "a cross entropy of 2 million logits or more"

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """None by itself: it saves memory."""
        return Refusal("it saves memory, and hardly any time: `hasten tune --memory SIZE` tries it")

    def process(self) -> None:
        """Put a cross entropy in the place of torch's that computes large ones by rows; its graphs stay whole."""
        _FUNCTIONS.need(self)
        _acting.add(self)

    def restore(self) -> None:
        """Put torch's own back."""
        _acting.discard(self)
        _FUNCTIONS.leave(self)


def _functions() -> list[Replaced]:
    import torch

    return [Replaced(torch.nn.functional, "cross_entropy", _change)]


_FUNCTIONS = Replacements(_functions)


def _change(plain: Any) -> Any:
    import torch

    from hasten.techniques.memory.loss_by_rows import by_rows

    is_compiling = torch.compiler.is_compiling

    def cross_entropy(
        input: Any,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        options = weight is None and size_average is None and reduce is None and not label_smoothing
        # A script's own name for the function (`from ... import cross_entropy`) keeps ours when torch's is back.
        if not len(_acting) or is_compiling() or not options or not _is_large(input, target, torch):
            return plain(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        # A single row says what is wrong with the arguments, and of which type the loss is under autocast.
        dtype = plain(input[:1].detach(), target[:1], None, None, ignore_index, None, reduction).dtype
        for technique in _acting:
            if "loss" not in technique.acted:
                technique.did("loss")
        return by_rows(input, target, ignore_index, reduction, dtype)

    return cross_entropy


def _is_large(logits: Any, target: Any, torch: Any) -> bool:
    """Whether these are logits of a large loss that is to be differentiated, and plain tensors."""
    return (
        type(logits) is torch.Tensor
        and type(target) is torch.Tensor
        and logits.requires_grad
        and torch.is_grad_enabled()
        and logits.dim() == 2
        and target.dim() == 1
        and len(target) == len(logits) > 0
        and logits.numel() >= _LEAST
        and logits.is_floating_point()
        and target.dtype is torch.int64
        and not torch._C._are_functorch_transforms_active()
    )
