"""LossModule: wraps a plain network and a loss function as a Module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hasten.errors import HastenError
from hasten.trainer.module import Module


class LossModule(Module):
    """Module for a plain `nn.Module` and a loss, for `Trainer().fit(net, loader, loss=fn)`.

    A batch is `(input, target)`, or `(input, ..., target)`: the last entry goes to the loss.
    """

    def __init__(self, net: torch.nn.Module, loss: Callable[..., torch.Tensor], optimizer: Any = None) -> None:
        super().__init__()
        self.net = net
        self.loss = loss
        self._optimizer = optimizer

    def forward(self, *inputs: Any) -> Any:
        """Return the network's output."""
        return self.net(*inputs)

    def _loss(self, batch: Any) -> torch.Tensor:
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise HastenError(
                f"fit(..., loss=...) needs batches of (input, target), this one is a {type(batch).__name__}",
                "let the dataset give pairs, or write a hasten.Module with a training_step",
            )
        return self.loss(self.net(*batch[:-1]), batch[-1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch, and log it as `train_loss`."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the loss as `val_loss`."""
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the loss as `test_loss`."""
        self.log("test_loss", self._loss(batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return the network's output; the last of several entries of a batch is taken for the target and dropped."""
        return self.net(*batch[:-1]) if isinstance(batch, tuple | list) and len(batch) > 1 else self.net(batch)

    def configure_optimizers(self) -> Any:
        """Return the given optimizer (an object, or a function of the parameters), or else AdamW with lr 1e-3."""
        optimizer = self._optimizer
        if isinstance(optimizer, torch.optim.Optimizer):
            return optimizer
        return (
            torch.optim.AdamW(self.net.parameters(), lr=1e-3) if optimizer is None else optimizer(self.net.parameters())
        )
