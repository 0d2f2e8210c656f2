"""A LightningModule that logs objects of torchmetrics. Importing this skips a test file where that is not installed."""

import pytest
import torch

from tests.trainer.lightning.sides import Net

torchmetrics = pytest.importorskip("torchmetrics")


class Measured(Net):
    """Logs metrics as objects, in all the usual ways."""

    def __init__(self):
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.mean = torchmetrics.MeanMetric()
        self.largest = torchmetrics.MaxMetric()
        pair = {"mae": torchmetrics.MeanAbsoluteError(), "mse": torchmetrics.MeanSquaredError()}
        self.many = torchmetrics.MetricCollection(pair, prefix="train_")
        self.val_many = self.many.clone(prefix="val_")
        self.val_errors = torch.nn.ModuleList([torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError()])

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        self.error(out, y)
        self.log("error", self.error, on_step=True, on_epoch=True, prog_bar=True)
        loss = torch.nn.functional.mse_loss(out, y)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.largest.update(loss.detach())
        self.log("largest", self.largest, on_step=False, on_epoch=True)
        self.log_dict(self.many(out, y))
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        out = self(x)
        error = self.val_errors[dataloader_idx]
        error(out, y)
        self.log("val_error", error, on_epoch=True)
        self.val_many.update(out, y)

    def on_validation_epoch_end(self):
        self.log_dict(self.val_many.compute())
        self.val_many.reset()

    def on_train_epoch_end(self):
        self.many.reset()
