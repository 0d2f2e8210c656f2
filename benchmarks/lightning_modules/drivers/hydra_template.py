"""ashleve/lightning-hydra-template: MNISTLitModule and MNISTDataModule, on a tiny made-up MNIST."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from pieces import Pieces

from drivers.mnist_files import write_mnist


def build(pl: Any, work: Path) -> Pieces:
    """The template's own configs (mnist.yaml, default callbacks), with fewer images and three epochs."""
    from src.data.mnist_datamodule import MNISTDataModule
    from src.models.components.simple_dense_net import SimpleDenseNet
    from src.models.mnist_module import MNISTLitModule

    write_mnist(work / "data", 900, 100)
    data = MNISTDataModule(data_dir=str(work / "data"), train_val_test_split=(700, 200, 100), batch_size=64)
    module = MNISTLitModule(
        net=SimpleDenseNet(input_size=784, lin1_size=64, lin2_size=128, lin3_size=64, output_size=10),
        optimizer=functools.partial(torch.optim.Adam, lr=0.001, weight_decay=0.0),  # type: ignore[arg-type]
        scheduler=functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, mode="min", factor=0.1, patience=1),
        compile=False,
    )
    callbacks = [
        pl.callbacks.ModelCheckpoint(
            dirpath=work / "checkpoints",
            filename="epoch_{epoch:03d}",
            monitor="val/acc",
            mode="max",
            save_last=True,
            auto_insert_metric_name=False,
        ),
        pl.callbacks.EarlyStopping(monitor="val/acc", patience=2, mode="max"),
    ]
    arguments = {
        "callbacks": callbacks,
        "max_epochs": 4,
        "logger": pl.loggers.CSVLogger(str(work)),
        "log_every_n_steps": 1,
    }
    return Pieces(
        module, {"datamodule": data}, arguments, {"validate": {"datamodule": data}, "test": {"datamodule": data}}
    )
