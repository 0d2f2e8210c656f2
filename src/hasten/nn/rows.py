"""Arithmetic of the chunked cross entropy: losses and gradients of a chunk of rows of logits at a time.

A chunk's logits are overwritten in place by their probabilities, then by their gradients, so one chunk is all the
memory that is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Gradients:
    """Gradients that are accumulated chunk by chunk; None for an input that needs none.

    Those of weight and bias are in float32 for 16-bit inputs: a sum over chunks in 16 bits would be rounded each time.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def like(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs_grad: tuple[bool, bool, bool]
    ) -> Gradients:
        """Return buffers for the wanted gradients (of hidden, weight, bias); those that are summed start at zero."""
        wide = RowLosses.wide(hidden)
        return cls(
            torch.empty_like(hidden) if needs_grad[0] else None,
            torch.zeros_like(weight, dtype=wide) if needs_grad[1] else None,
            torch.zeros_like(bias, dtype=wide) if needs_grad[2] and bias is not None else None,
            (hidden.dtype, weight.dtype, hidden.dtype if bias is None else bias.dtype),
        )

    def multiply(self, factor: Tensor) -> None:
        """Multiply all gradients in place by a scalar tensor."""
        for gradient in (self.hidden, self.weight, self.bias):
            if gradient is not None:
                gradient.mul_(factor)

    def in_input_dtypes(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias, each in its input's dtype."""
        all_three = (self.hidden, self.weight, self.bias)
        return tuple(one if one is None else one.to(dtype) for one, dtype in zip(all_three, self.dtypes, strict=True))


@dataclass(frozen=True)
class RowLosses:
    """Computes losses and gradients of rows, with the options of the cross entropy.

    Attributes:
        ignore_index: Target of rows to ignore.
        smoothing: Part of each target that is spread over all classes.
        size: Rows per chunk.
    """

    ignore_index: int
    smoothing: float
    size: int

    @staticmethod
    def wide(hidden: Tensor) -> torch.dtype:
        """Return the dtype in which exponentials and sums are computed: float32 for 16-bit inputs."""
        return torch.float32 if hidden.dtype in (torch.bfloat16, torch.float16) else hidden.dtype

    def losses(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        gradients: Gradients | None,
        scale: Tensor,
    ) -> Tensor:
        """Return each row's loss, and add the rows' scaled gradients to `gradients`.

        Args:
            hidden: (rows, features).
            weight: (classes, features).
            target: (rows).
            bias: (classes), or None.
            gradients: Gradients to add to; None: compute losses only.
            scale: Factor on each row's gradient, (rows); 0 for ignored rows.
        """
        result = torch.zeros(target.shape, dtype=self.wide(hidden), device=hidden.device)
        # Dtypes are chosen by the caller: in a backward that runs under autocast, products would be cast once more.
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(target), self.size):
                part = slice(start, start + self.size)
                logits = torch.nn.functional.linear(hidden[part], weight, bias).to(self.wide(hidden))
                result[part] = self._of_chunk(logits, target[part])
                if gradients is not None:
                    self._to_gradients(logits, target[part], scale[part])
                    _add(gradients, part, logits.to(hidden.dtype), hidden[part], weight)
                del logits  # otherwise two chunks would exist while the next one is computed
        return result

    def _of_chunk(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the rows' losses; overwrite `logits` by the probabilities."""
        counts = target != self.ignore_index
        index = target.where(counts, 0).unsqueeze(1)
        right = logits.gather(1, index).squeeze(1)
        mean = logits.mean(1) if self.smoothing else None
        largest = logits.amax(1, keepdim=True)
        total = logits.sub_(largest).exp_().sum(1, keepdim=True)
        logits.div_(total)
        logarithm = (total.log_() + largest).squeeze(1)
        loss = logarithm - right
        if mean is not None:
            loss = (1 - self.smoothing) * loss + self.smoothing * (logarithm - mean)
        return loss.where(counts, 0)

    def _to_gradients(self, probabilities: Tensor, target: Tensor, scale: Tensor) -> None:
        """Overwrite probabilities by the gradients of the logits: (probability - smoothed target) * scale."""
        classes = probabilities.shape[1]
        if self.smoothing:
            probabilities.sub_(self.smoothing / classes)
        index = target.where(target != self.ignore_index, 0).unsqueeze(1)
        less = torch.full_like(scale, self.smoothing - 1).unsqueeze(1)
        probabilities.scatter_add_(1, index, less).mul_(scale.unsqueeze(1))


def _add(gradients: Gradients, part: slice, logits_grad: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """Add the gradients of hidden, weight and bias that follow from those of a chunk's logits."""
    if gradients.hidden is not None:
        torch.mm(logits_grad, weight, out=gradients.hidden[part])
    if gradients.weight is not None:
        if gradients.weight.dtype is logits_grad.dtype:
            gradients.weight.addmm_(logits_grad.t(), hidden)
        else:
            gradients.weight.add_(logits_grad.t() @ hidden)
    if gradients.bias is not None:
        gradients.bias.add_(logits_grad.sum(0, dtype=gradients.bias.dtype))
