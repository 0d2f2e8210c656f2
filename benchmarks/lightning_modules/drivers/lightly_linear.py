"""lightly-ai/lightly: LinearClassifier and MetricCallback of its benchmarks, on made-up pictures of 32 x 32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pieces import Pieces
from torch.utils.data import DataLoader


def build(pl: Any, work: Path) -> Pieces:
    """As benchmarks/imagenet/resnet50/linear.py: a frozen ResNet-18 and a linear layer, ten epochs."""
    from lightly.utils.benchmarking import LinearClassifier, MetricCallback
    from torchvision.models import resnet18

    network = resnet18()
    network.fc = torch.nn.Identity()
    module = LinearClassifier(model=network, batch_size_per_device=4, feature_dim=512, num_classes=10, topk=(1, 5))
    samples = [(image, at % 10, "name") for at, image in enumerate(torch.rand(22, 3, 32, 32))]
    fit = {
        "train_dataloaders": DataLoader(samples[:16], batch_size=4, shuffle=True, drop_last=True),  # type: ignore[arg-type]
        "val_dataloaders": DataLoader(samples[16:], batch_size=4),  # type: ignore[arg-type]
    }
    callbacks = [pl.callbacks.LearningRateMonitor(), MetricCallback()]
    logger = pl.loggers.TensorBoardLogger(save_dir=str(work), name="linear")
    arguments = {"max_epochs": 3, "callbacks": callbacks, "logger": logger, "num_sanity_val_steps": 0}
    return Pieces(module, fit, {**arguments, "log_every_n_steps": 1})
