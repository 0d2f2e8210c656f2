"""McHoody/mnist_vae: LightningVAE and MNISTDataModule, on a tiny made-up MNIST."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pieces import Pieces

from drivers.mnist_files import write_mnist


def build(pl: Any, work: Path) -> Pieces:
    """As the repository's main.py, with three epochs of eight batches."""
    from data import MNISTDataModule
    from net import LightningVAE

    write_mnist(work / "data", 128, 64)
    module = LightningVAE({"model": {"in_channels": 1, "latent_size": 8}, "optimizer": {"lr": 1e-3}})
    data = MNISTDataModule(data_dir=str(work / "data"), batch_size=16)
    data.setup()
    logger = pl.loggers.TensorBoardLogger(save_dir=str(work), name="VAE")
    for folder in ("Reconstructions", "Samples"):
        (Path(logger.log_dir) / folder).mkdir(parents=True)
    checkpoint = pl.callbacks.ModelCheckpoint(
        save_top_k=1, dirpath=str(Path(logger.log_dir) / "checkpoints"), monitor="val_loss", save_last=True
    )
    arguments = {"max_epochs": 3, "logger": logger, "callbacks": [checkpoint], "log_every_n_steps": 2}
    return Pieces(module, {"datamodule": data}, arguments)
