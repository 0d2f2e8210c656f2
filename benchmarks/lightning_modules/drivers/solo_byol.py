"""vturrisi/solo-learn: BYOL with a ResNet-18 for CIFAR, on made-up pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pieces import Pieces
from torch.utils.data import DataLoader


def build(pl: Any, work: Path) -> Pieces:
    """After scripts/pretrain/cifar/byol.yaml, smaller: warm-up and cosine by step, gradients of two batches added."""
    from omegaconf import OmegaConf
    from solo.methods.byol import BYOL

    config = OmegaConf.create(
        {
            "method": "byol",
            "backbone": {"name": "resnet18"},
            "method_kwargs": {"proj_hidden_dim": 64, "proj_output_dim": 32, "pred_hidden_dim": 64},
            "momentum": {"base_tau": 0.99, "final_tau": 1.0, "classifier": True},
            "data": {"dataset": "cifar10", "num_classes": 10, "num_large_crops": 2, "num_small_crops": 0},
            "optimizer": {"name": "sgd", "batch_size": 4, "lr": 0.1, "classifier_lr": 0.1, "weight_decay": 1e-5},
            "scheduler": {"name": "warmup_cosine", "warmup_epochs": 0.5},
            "knn_eval": {"enabled": False},  # its kNN asks torchmetrics for an option that is gone
            "accumulate_grad_batches": 2,
            "max_epochs": 2,
        }
    )
    images = torch.rand(24, 3, 16, 16)
    train = [(at, [image, image.flip(2)], at % 10) for at, image in enumerate(images[:16])]
    val = [(image, at % 10) for at, image in enumerate(images[16:])]
    fit = {
        "train_dataloaders": DataLoader(train, batch_size=4, shuffle=True, drop_last=True),  # type: ignore[arg-type]
        "val_dataloaders": DataLoader(val, batch_size=3),  # type: ignore[arg-type]
    }
    callbacks = [pl.callbacks.LearningRateMonitor(logging_interval="step")]
    arguments = {"max_epochs": 2, "accumulate_grad_batches": 2, "callbacks": callbacks, "log_every_n_steps": 1}
    return Pieces(BYOL(config), fit, {**arguments, "logger": pl.loggers.CSVLogger(str(work))})
