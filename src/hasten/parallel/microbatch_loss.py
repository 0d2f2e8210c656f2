"""Compute a batch's loss in equal microbatches, and verify that their mean is the loss of the whole batch.

It is, if the loss is a mean over samples. It is not, for example, for a mean over tokens that are not ignored, when
microbatches have different numbers of them. Two checks find such losses: the divisors of `F.cross_entropy` and
`F.nll_loss` are compared between the microbatches of every batch; in some batches the loss and its gradient are also
computed for the whole batch at once.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hasten.errors import HastenError

Loss = Callable[[Any, Any], torch.Tensor]

_APART = 1e-3  # relative difference of losses, or gradients, that is more than float32 rounding
_APART_16 = 3e-2  # the same for 16-bit types
_DIVIDE = (F.cross_entropy, F.nll_loss)
_FIX = 'Use reduction="mean" without weights or an ignore_index that parts have unequally many of; or microbatches=1.'
_WHY = (
    "",
    "The loss of the whole batch is {0:.6g}, the mean of its parts' losses {1:.6g}: it is no mean over samples.",
    "The gradients of the whole batch's loss and of its parts' mean are {0:.2g} % apart: it is no mean over samples.",
    "One part's loss divides by {0:g} (targets not ignored, or weights), another's by {1:g}: no mean over samples.",
)


class Verdict(NamedTuple):
    """Problem with a loss, as three numbers that can be sent in a tensor: a message's index in `_WHY` and its values.

    All zeros if there is none.
    """

    why: float = 0.0
    first: float = 0.0
    second: float = 0.0

    def check(self) -> None:
        """Raise the problem, if there is one.

        Raises:
            HastenError: The loss is not a mean over samples.
        """
        if self.why:
            raise HastenError(_WHY[int(self.why)].format(self.first, self.second), _FIX)


class MicrobatchLoss:
    """Computes the loss of microbatches ("parts"), each scaled to its share of the batch's gradient, and checks them.

    Args:
        loss: `(output, target)` -> mean over their samples.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._share = 1.0
        self._recorded: list[tuple[torch.Tensor, Any]] | None = None
        self._parts: list[_Divisors] = []
        # Whether the loss calls cross entropy as often for a whole batch as for a part; None: not checked yet.
        self._of_batch: bool | None = None
        self._narrow = False

    def begin(self, share: float, looks: bool) -> None:
        """Begin a batch.

        Args:
            share: Factor on each part's loss.
            looks: Whether to compare the parts with the whole batch. Needed in the first batch with several parts.
        """
        self._share, self._recorded, self._parts = share, [] if looks else None, []

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        """Return a part's loss times its share.

        Raises:
            HastenError: The loss is not a single number.
        """
        with _Divisors() as recording:
            loss: Any = self._loss(output, target)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise HastenError(f"The loss of a pipeline is {got}, not one number.", "Return the mean over samples.")
        self._parts.append(recording)
        self._narrow = loss.dtype.itemsize < 4
        if self._recorded is not None:
            self._recorded.append((output.detach(), target))
        return loss * self._share

    def verdict(self, mean: float) -> Verdict:
        """Return the problem of the batch that has ended.

        Args:
            mean: Mean of the parts' losses.
        """
        recorded, self._recorded = self._recorded, None
        if recorded and (compared := self._compared(recorded, mean)).why:
            return compared
        # Otherwise the number of cross entropies depends on the samples, and the parts' divisors do not correspond.
        if self._of_batch:
            parts = [[float(divisor) for divisor in part.divisors] for part in self._parts]
            for first, second in ((a, b) for part in parts for a, b in zip(parts[0], part, strict=False)):
                if abs(first - second) > 1e-6 * max(abs(first), abs(second)):
                    return Verdict(3, first, second)
        return Verdict()

    def _compared(self, recorded: list[tuple[torch.Tensor, Any]], mean: float) -> Verdict:
        """Compare the parts' loss and gradient with those of the whole batch, computed once more here."""
        outputs, targets = (torch.cat(parts) for parts in zip(*recorded, strict=True))
        with _Divisors() as recording:
            loss, of_batch = self._differentiated(outputs, targets)
        self._of_batch = len(recording.divisors) == len(self._parts[0].divisors)
        # The tolerance follows the dtype of what is compared: a float32 loss may have 16-bit gradients.
        tolerance = _APART_16 if self._narrow else _APART
        if math.isfinite(loss) and abs(mean - loss) > tolerance * max(abs(mean), abs(loss)):
            return Verdict(1, loss, mean)
        if of_batch is None:
            return Verdict()
        # Equal losses prove nothing yet: in an untrained model all samples may have the same loss. Gradients differ.
        gradients = [self._differentiated(*part)[1] for part in recorded]
        parted = torch.cat([gradient for gradient in gradients if gradient is not None]) / len(recorded)
        largest = max(float(of_batch.norm()), float(parted.norm()))
        tolerance = _APART_16 if self._narrow or outputs.dtype.itemsize < 4 else _APART
        if math.isfinite(largest) and (off := float((of_batch - parted).norm())) > tolerance * largest + 1e-12:
            return Verdict(2, 100 * off / largest)
        return Verdict()

    def _differentiated(self, output: torch.Tensor, target: Any) -> tuple[float, torch.Tensor | None]:
        """Return the loss, and its gradient with respect to the output; None if it has none."""
        with torch.enable_grad():
            leaf = output.detach().requires_grad_(output.is_floating_point())
            loss = self._loss(leaf, target)
            if not (leaf.requires_grad and loss.requires_grad):
                return float(loss), None
            gradient: Any = torch.autograd.grad(loss, leaf, allow_unused=True)[0]
        return float(loss.detach()), None if gradient is None else gradient.float()


class _Divisors(TorchFunctionMode):
    """Mode that records the divisors of F.cross_entropy and F.nll_loss, whose mean is over weights, not samples."""

    def __init__(self) -> None:
        super().__init__()
        self.divisors: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DIVIDE:
            bound = inspect.signature(func).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            options = bound.arguments
            target, weight, means = options["target"], options["weight"], options["reduction"] == "mean"
            if means and options["size_average"] is not False and options["reduce"] is not False:
                if target.is_floating_point():  # class probabilities: torch divides by the number of samples
                    self.divisors.append(torch.ones(()))
                else:
                    counts = target != options["ignore_index"]
                    if weight is not None:
                        counts = torch.where(counts, weight.detach()[torch.where(counts, target, 0)], 0.0)
                    self.divisors.append(counts.sum())
        return func(*args, **(kwargs or {}))
