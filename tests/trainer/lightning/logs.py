"""A LightningModule that logs in many ways."""

import torch

from tests.trainer.lightning.sides import Net


class Logging(Net):
    """Logs in many ways."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("double", loss.double(), on_step=True, on_epoch=True)
        self.log("epoch", loss.detach() * 2, on_step=False, on_epoch=True, batch_size=3)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("least", loss, on_step=True, on_epoch=True, reduce_fx=torch.min)
        self.log("sum", batch_idx, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("hidden", loss, logger=False, prog_bar=True, on_epoch=True)
        self.log_dict({"a": 1.5, "b": loss}, on_step=True)
        return {"loss": loss, "index": torch.tensor(batch_idx)}

    def on_train_batch_start(self, batch, batch_idx):
        self.log("at_start", float(batch_idx))

    def on_before_optimizer_step(self, optimizer):
        self.log("lr", optimizer.param_groups[0]["lr"])

    def on_train_epoch_start(self):
        self.log("epoch_start", self.current_epoch)

    def on_train_epoch_end(self):
        self.log("epoch_end", 3.25, prog_bar=True)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = self.loss(batch)
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_step", loss, on_step=True, on_epoch=True)
        self.log("val_together", loss, add_dataloader_idx=dataloader_idx != 0, batch_size=batch_idx + 1)
        return loss

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.log("val_out", outputs)

    def on_validation_epoch_end(self):
        self.log("val_end", 2.0)
