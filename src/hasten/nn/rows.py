"""The arithmetic of a chunked loss: losses and gradients of some rows of logits at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Gradients:
    """Gradients that are summed up chunk by chunk; None: not wanted.

    In float32 for 16-bit inputs, since a sum over chunks in 16 bits would round each time.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def like(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, bool, bool]) -> Gradients:
        """Return zeros for those that are wanted."""
        wide = Rows.wide(hidden)
        return cls(
            torch.empty_like(hidden) if wanted[0] else None,
            torch.zeros_like(weight, dtype=wide) if wanted[1] else None,
            torch.zeros_like(bias, dtype=wide) if wanted[2] and bias is not None else None,
            (hidden.dtype, weight.dtype, hidden.dtype if bias is None else bias.dtype),
        )

    def multiply(self, factor: Tensor) -> None:
        """Multiply all by a number on the device."""
        for gradient in (self.hidden, self.weight, self.bias):
            if gradient is not None:
                gradient.mul_(factor)

    def given(self) -> tuple[Tensor | None, ...]:
        """Return them in the types of what they belong to."""
        all_three = (self.hidden, self.weight, self.bias)
        return tuple(one if one is None else one.to(dtype) for one, dtype in zip(all_three, self.dtypes, strict=True))


@dataclass(frozen=True)
class Rows:
    """How rows of logits become losses.

    Attributes:
        ignore_index: The target of rows that do not count.
        smoothing: How much of each target is spread over all classes.
        size: Rows at a time.
    """

    ignore_index: int
    smoothing: float
    size: int

    @staticmethod
    def wide(hidden: Tensor) -> torch.dtype:
        """Return the type in which exponentials and sums are computed."""
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
        """Return each row's loss, and add its gradient times its scale to the gradients, if there are any.

        Args:
            hidden: (rows, features).
            weight: (classes, features).
            target: (rows).
            bias: (classes), or None.
            gradients: Where to add.
            scale: What each row's gradient is multiplied by, (rows); 0 where the row does not count.
        """
        result = torch.zeros(target.shape, dtype=self.wide(hidden), device=hidden.device)
        # Types were chosen before: in a backward that runs under autocast, products would be cast again.
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(target), self.size):
                part = slice(start, start + self.size)
                logits = torch.nn.functional.linear(hidden[part], weight, bias).to(self.wide(hidden))
                result[part] = self._of_chunk(logits, target[part])
                if gradients is not None:
                    self._to_gradients(logits, target[part], scale[part])
                    _add(gradients, part, logits.to(hidden.dtype), hidden[part], weight)
                del logits  # else there would be two chunks while the next one is computed
        return result

    def _of_chunk(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the rows' losses; `logits` become probabilities, in their own memory."""
        counts = target != self.ignore_index
        index = target.where(counts, 0).unsqueeze(1)
        right = logits.gather(1, index).squeeze(1)
        mean = logits.mean(1) if self.smoothing else None
        greatest = logits.amax(1, keepdim=True)
        total = logits.sub_(greatest).exp_().sum(1, keepdim=True)
        logits.div_(total)
        logarithm = (total.log_() + greatest).squeeze(1)
        loss = logarithm - right
        if mean is not None:
            loss = (1 - self.smoothing) * loss + self.smoothing * (logarithm - mean)
        return loss.where(counts, 0)

    def _to_gradients(self, probabilities: Tensor, target: Tensor, scale: Tensor) -> None:
        """Turn probabilities into the gradients of the logits, in their own memory."""
        classes = probabilities.shape[1]
        if self.smoothing:
            probabilities.sub_(self.smoothing / classes)
        index = target.where(target != self.ignore_index, 0).unsqueeze(1)
        less = torch.full_like(scale, self.smoothing - 1).unsqueeze(1)
        probabilities.scatter_add_(1, index, less).mul_(scale.unsqueeze(1))


def _add(gradients: Gradients, part: slice, of_logits: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """Add what a chunk's logits mean for hidden, weight and bias."""
    if gradients.hidden is not None:
        torch.mm(of_logits, weight, out=gradients.hidden[part])
    if gradients.weight is not None:
        if gradients.weight.dtype is of_logits.dtype:
            gradients.weight.addmm_(of_logits.t(), hidden)
        else:
            gradients.weight.add_(of_logits.t() @ hidden)
    if gradients.bias is not None:
        gradients.bias.add_(of_logits.sum(0, dtype=gradients.bias.dtype))
