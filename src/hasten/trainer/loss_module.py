"""LossModule: a network and a loss, trained as a Module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hasten.errors import HastenError
from hasten.trainer.module import Module


class LossModule(Module):
    """A plain `nn.Module` with a loss, as `Trainer().fit(net, loader, loss=fn)` trains it.

    A batch is `(input, target)`, or `(input, ..., target)`: the last entry goes to the loss.
    """

    def __init__(self, net: torch.nn.Module, loss: Callable[..., torch.Tensor], optimizer: Any = None) -> None:
        super().__init__()
        self.net = net
        self.loss = loss
        self._optimizer = optimizer

    def forward(self, *inputs: Any) -> Any:
        """The network's output."""
        return self.net(*inputs)

    def _loss(self, batch: Any) -> torch.Tensor:
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise HastenError(
                f"fit(..., loss=...) needs batches of (input, target), this one is a {type(batch).__name__}",
                "let the dataset give pairs, or write a hasten.Module with a training_step",
            )
        return self.loss(self.net(*batch[:-1]), batch[-1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The loss of a batch, logged as `train_loss`."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """The mean loss, logged as `val_loss`."""
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """The mean loss, logged as `test_loss`."""
        self.log("test_loss", self._loss(batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """The network's output; a batch of several entries is taken to end with the target."""
        return self.net(*batch[:-1]) if isinstance(batch, tuple | list) and len(batch) > 1 else self.net(batch)

    def configure_optimizers(self) -> Any:
        """The optimizer that was given (built, or a function of the parameters); else AdamW at 1e-3."""
        given = self._optimizer
        if isinstance(given, torch.optim.Optimizer):
            return given
        return torch.optim.AdamW(self.net.parameters(), lr=1e-3) if given is None else given(self.net.parameters())
