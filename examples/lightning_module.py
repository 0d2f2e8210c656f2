"""`python examples/lightning_module.py`: a LightningModule under hasten's Trainer; needs `pip install lightning`.

The module, the datamodule and the callbacks are Lightning's, as they were; one line differs, the import of the Trainer.
Makes its own data; takes a few seconds on a CPU.
"""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import Trainer  # was: from lightning.pytorch import Trainer


class Waves(pl.LightningDataModule):
    """Noisy sums of sines, to be told from their first half: inputs of (rows, 32), targets of (rows, 32)."""

    def setup(self, stage):
        g = torch.Generator().manual_seed(0)
        t = torch.linspace(0, 4, 64)
        frequency, phase = 1 + 3 * torch.rand(2, 5000, 1, generator=g)
        waves = torch.sin(frequency * t + phase) + 0.05 * torch.randn(5000, 64, generator=g)
        self.train = TensorDataset(waves[:4000, :32], waves[:4000, 32:])
        self.val = TensorDataset(waves[4000:, :32], waves[4000:, 32:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=64, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=200)


class Forecast(pl.LightningModule):
    """An MLP that goes on with a wave."""

    def __init__(self, width=128, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 32)
        )

    def training_step(self, batch, batch_idx):
        past, future = batch
        loss = F.mse_loss(self.net(past), future)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        past, future = batch
        self.log("val_loss", F.mse_loss(self.net(past), future), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)]


def main():
    pl.seed_everything(0)
    best = ModelCheckpoint(monitor="val_loss")
    trainer = Trainer(
        max_epochs=8,
        callbacks=[best, EarlyStopping("val_loss", patience=3)],
        logger=CSVLogger("build/lightning_module"),
        gradient_clip_val=1.0,
    )
    trainer.fit(Forecast(), datamodule=Waves())
    model = Forecast.load_from_checkpoint(best.best_model_path)
    print(f"best: {best.best_model_path}")
    trainer.validate(model, datamodule=Waves())


if __name__ == "__main__":
    main()
