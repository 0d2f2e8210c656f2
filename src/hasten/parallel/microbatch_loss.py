"""The loss of a batch computed in equal microbatches, and whether their mean is the batch's loss."""

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

_APART = 1e-3  # relative difference of losses, or gradients, that is no rounding
_APART_16 = 3e-2
_DIVIDE = (F.cross_entropy, F.nll_loss)
_FIX = 'Use reduction="mean" without weights or an ignore_index that parts have unequally many of; or microbatches=1.'
_WHY = (
    "",
    "The loss of the whole batch is {0:.6g}, the mean of its parts' losses {1:.6g}: it is no mean over samples.",
    "The gradients of the whole batch's loss and of its parts' mean are {0:.2g} % apart: it is no mean over samples.",
    "One part's loss divides by {0:g} (targets not ignored, or weights), another's by {1:g}: no mean over samples.",
)


class Verdict(NamedTuple):
    """A problem of a loss, as numbers that can be sent: the place of a message, and what stands in it."""

    why: float = 0.0
    one: float = 0.0
    other: float = 0.0

    def check(self) -> None:
        """Raise where something is wrong.

        Raises:
            HastenError: The loss is no mean over samples.
        """
        if self.why:
            raise HastenError(_WHY[int(self.why)].format(self.one, self.other), _FIX)


class MicrobatchLoss:
    """Computes the loss of parts, each with its share of the gradient.

    What cross entropies divide by is compared in each batch, the whole batch's loss and its gradient where asked for.

    Args:
        loss: `(output, target)` -> the mean over their samples.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._share = 1.0
        self._kept: list[tuple[torch.Tensor, Any]] | None = None
        self._parts: list[_Divisors] = []
        self._of_batch: bool | None = None  # whether as many cross entropies are computed for a batch as for a part
        self._narrow = False

    def begin(self, share: float, looks: bool) -> None:
        """A batch begins.

        Args:
            share: Of a part's loss in the gradient.
            looks: Whether to compare the parts with the whole: also in the first batch that has several.
        """
        self._share, self._kept, self._parts = share, [] if looks else None, []

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        """Return a part's loss, times its share.

        Raises:
            HastenError: It is not one number.
        """
        with _Divisors() as divisors:
            loss: Any = self._loss(output, target)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise HastenError(f"The loss of a pipeline is {got}, not one number.", "Return the mean over samples.")
        self._parts.append(divisors)
        self._narrow = loss.dtype.itemsize < 4
        if self._kept is not None:
            self._kept.append((output.detach(), target))
        return loss * self._share

    def verdict(self, mean: float) -> Verdict:
        """Return what is wrong with the batch that is over.

        Args:
            mean: Of the parts' losses.
        """
        kept, self._kept = self._kept, None
        if kept and (found := self._compared(kept, mean)).why:
            return found
        if self._of_batch:
            parts = [[float(one) for one in part.found] for part in self._parts]
            for one, other in ((a, b) for part in parts for a, b in zip(parts[0], part, strict=False)):
                if abs(one - other) > 1e-6 * max(abs(one), abs(other)):
                    return Verdict(3, one, other)
        return Verdict()

    def _compared(self, kept: list[tuple[torch.Tensor, Any]], mean: float) -> Verdict:
        outputs, targets = (torch.cat(parts) for parts in zip(*kept, strict=True))
        with _Divisors() as divisors:
            loss, whole = self._differentiated(outputs, targets)
        self._of_batch = len(divisors.found) == len(self._parts[0].found)
        # Rounding of a loss in 16 bits is that of its value; gradients in 16 bits may come of one in 32.
        apart = _APART_16 if self._narrow else _APART
        if math.isfinite(loss) and abs(mean - loss) > apart * max(abs(mean), abs(loss)):
            return Verdict(1, loss, mean)
        if whole is None:
            return Verdict()
        # Before anything is learnt all samples may cost the same: then gradients alone tell.
        gradients = [self._differentiated(*part)[1] for part in kept]
        parted = torch.cat([one for one in gradients if one is not None]) / len(kept)
        largest = max(float(whole.norm()), float(parted.norm()))
        apart = _APART_16 if self._narrow or outputs.dtype.itemsize < 4 else _APART
        if math.isfinite(largest) and (off := float((whole - parted).norm())) > apart * largest + 1e-12:
            return Verdict(2, 100 * off / largest)
        return Verdict()

    def _differentiated(self, output: torch.Tensor, target: Any) -> tuple[float, torch.Tensor | None]:
        """Return the loss and its gradient in the output; None where it has none."""
        with torch.enable_grad():
            given = output.detach().requires_grad_(output.is_floating_point())
            loss = self._loss(given, target)
            if not (given.requires_grad and loss.requires_grad):
                return float(loss), None
            gradient: Any = torch.autograd.grad(loss, given, allow_unused=True)[0]
        return float(loss.detach()), None if gradient is None else gradient.float()


class _Divisors(TorchFunctionMode):
    """Keeps what F.cross_entropy and F.nll_loss divide by while it is entered: the two whose mean is over weights."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DIVIDE:
            given = inspect.signature(func).bind(*args, **(kwargs or {}))
            given.apply_defaults()
            options = given.arguments
            target, weight, means = options["target"], options["weight"], options["reduction"] == "mean"
            if means and options["size_average"] is not False and options["reduce"] is not False:
                if target.is_floating_point():  # probabilities: torch divides by samples
                    self.found.append(torch.ones(()))
                else:
                    counts = target != options["ignore_index"]
                    if weight is not None:
                        counts = torch.where(counts, weight.detach()[torch.where(counts, target, 0)], 0.0)
                    self.found.append(counts.sum())
        return func(*args, **(kwargs or {}))
