"""chengtan9907/OpenSTL: SimVP with the repository's callbacks, on made-up clips.

The repository asks timm for `Nadam` and others by names that timm has since changed; none of them is used here, so
the old names are set before the import. Nothing of the repository changes.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from pieces import Pieces
from torch.utils.data import DataLoader, TensorDataset

GONE = {"timm.optim.nadam": "Nadam", "timm.optim.radam": "RAdam", "timm.optim.nvnovograd": "NvNovoGrad"}


def build(pl: Any, work: Path) -> Pieces:
    """SimVP on clips of 4 + 4 frames of 16 x 16, OneCycle by step, two epochs, then a test."""
    for module_name, name in GONE.items():
        timm_module = importlib.import_module(module_name)
        if not hasattr(timm_module, name):
            setattr(timm_module, name, torch.optim.Adam)
    from openstl.methods.simvp import SimVP
    from openstl.utils.callbacks import BestCheckpointCallback, EpochEndCallback

    clips = torch.rand(28, 8, 1, 16, 16)
    data = TensorDataset(clips[:, :4], clips[:, 4:])
    train, val = torch.utils.data.random_split(data, [20, 8])
    module = SimVP(
        dataname="mmnist",
        data_name="mmnist",
        metrics=["mse", "mae"],
        in_shape=[4, 1, 16, 16],
        hid_S=8,
        hid_T=16,
        N_S=2,
        N_T=2,
        model_type="gSTA",
        pre_seq_length=4,
        aft_seq_length=4,
        opt="adam",
        lr=1e-3,
        weight_decay=0.0,
        filter_bias_and_bn=False,
        sched="onecycle",
        gpus=[0],
        epoch=2,
        steps_per_epoch=5,
        test_mean=0.0,
        test_std=1.0,
        save_dir=str(work / "saved"),
        momentum=0.9,
        drop_path=0.1,
    )
    fit = {
        "train_dataloaders": DataLoader(train, batch_size=4, shuffle=True),
        "val_dataloaders": DataLoader(val, batch_size=4),
    }
    callbacks = [
        BestCheckpointCallback(
            monitor="val_loss",
            filename="best-{epoch:02d}-{val_loss:.3f}",
            mode="min",
            save_last=True,
            dirpath=str(work / "checkpoints"),
            verbose=True,
            every_n_epochs=1,
        ),
        EpochEndCallback(),
        pl.callbacks.LearningRateMonitor(logging_interval=None),
    ]
    arguments = {"max_epochs": 2, "callbacks": callbacks, "logger": pl.loggers.CSVLogger(str(work))}
    return Pieces(module, fit, {**arguments, "log_every_n_steps": 1}, {"test": {"dataloaders": fit["val_dataloaders"]}})
