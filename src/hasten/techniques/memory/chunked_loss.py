"""The technique `chunked_loss`: replace large calls of `F.cross_entropy`. `loss_by_rows` computes them."""

from __future__ import annotations

import weakref
from typing import Any

from hasten.evidence import Evidence
from hasten.techniques.base import Choices, Effect, Refusal, Resource
from hasten.techniques.replaced import ReplacedFunction, Replacements
from hasten.techniques.switches import Stepwise

_LEAST = 2**21  # elements in the logits: with fewer there is little to save

_acting: weakref.WeakSet[Any] = weakref.WeakSet()


class ChunkedLoss(Stepwise):
    """Compute large cross entropies some rows at a time, which saves a copy of the logits and one of their gradient.

    `F.cross_entropy` and `nn.CrossEntropyLoss` keep the log-softmax of all logits, and their backward makes two
    tensors of that size; computed by rows, only the logits themselves and their gradient exist. Value and gradients are
    the same except for rounding. It acts on 2-D logits with class indices, from 2 million elements on; class weights,
    label smoothing, probabilities as targets, and compiled code are left alone. Logits that are changed in place after
    the loss, and gradients of gradients, end in an error. A script that uses `hasten.nn.ChunkedCrossEntropy` never
    holds all logits at all.
    """

    name = "chunked_loss"
    effect = Effect.ROUNDING
    relieves = Resource.MEMORY
    sources = ("Wolf", "Liger Kernel, arXiv 2410.10989")
    acts_on = "a cross entropy of 2 million logits or more"

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose nothing: it saves memory, and hardly any time."""
        return Refusal("it saves memory, and hardly any time: `hasten tune --memory SIZE` tries it")

    def process(self) -> None:
        """Replace torch's cross entropy by one that computes large losses by rows."""
        _FUNCTIONS.need(self)
        _acting.add(self)

    def restore(self) -> None:
        """Restore torch's own. Graphs made before stay valid."""
        _acting.discard(self)
        _FUNCTIONS.leave(self)


def _functions() -> list[ReplacedFunction]:
    import torch

    return [ReplacedFunction(torch.nn.functional, "cross_entropy", _change)]


_FUNCTIONS = Replacements(_functions)


def _change(plain: Any) -> Any:
    """Wrap `F.cross_entropy`, with the same signature."""
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
        # A script may hold this wrapper under its own name (`from torch.nn.functional import cross_entropy`) after
        # torch's function was restored: then no technique acts.
        if not len(_acting) or is_compiling() or not options or not _is_large(input, target, torch):
            return plain(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        # One row through torch's own function, to raise its error for wrong arguments and to learn the loss's dtype
        # under autocast.
        dtype = plain(input[:1].detach(), target[:1], None, None, ignore_index, None, reduction).dtype
        for technique in _acting:
            if "loss" not in technique.acted:
                technique.did("loss")
        return by_rows(input, target, ignore_index, reduction, dtype)

    return cross_entropy


def _is_large(logits: Any, target: Any, torch: Any) -> bool:
    """Return whether the arguments are plain tensors of a large loss with a graph, with class indices as targets."""
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
