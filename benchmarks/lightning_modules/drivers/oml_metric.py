"""OML-Team/open-metric-learning: ExtractorModule with two MetricValCallbacks, on made-up pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pieces import Pieces
from PIL import Image
from torch.utils.data import DataLoader


def write_pictures(folder: Path) -> pd.DataFrame:
    """Pictures of six things, four each, and the table that the repository's datasets read."""
    draw = np.random.default_rng(0)
    rows = []
    for label in range(6):
        for number in range(4):
            path = folder / f"{label}_{number}.png"
            Image.fromarray(draw.integers(0, 200 + 9 * label, (32, 32, 3)).astype(np.uint8)).save(path)
            split = "train" if label < 4 else "validation"
            query = None if split == "train" else True
            rows.append({"label": label, "path": path.name, "split": split, "is_query": query, "is_gallery": query})
    return pd.DataFrame(rows)


def build(pl: Any, work: Path) -> Pieces:
    """After the repository's "training and 2 loaders validation" example, with a ResNet-18 and a step schedule."""
    from oml.datasets.base import DatasetQueryGallery, DatasetWithLabels
    from oml.lightning.callbacks.metric import MetricValCallback
    from oml.lightning.modules.extractor import ExtractorModule
    from oml.losses.triplet import TripletLossWithMiner
    from oml.metrics.embeddings import EmbeddingMetrics
    from oml.miners.inbatch_all_tri import AllTripletsMiner
    from oml.models import ResnetExtractor
    from oml.samplers.balance import BalanceSampler
    from oml.transforms.images.torchvision import get_normalisation_resize_torch

    table = write_pictures(work)
    transform = get_normalisation_resize_torch(im_size=32)
    train = DatasetWithLabels(
        table[table.split == "train"].reset_index(drop=True), dataset_root=work, transform=transform
    )
    held = table[table.split == "validation"].reset_index(drop=True)
    extractor = ResnetExtractor(weights=None, arch="resnet18", gem_p=None, remove_fc=True, normalise_features=False)
    optimizer = torch.optim.SGD(extractor.parameters(), lr=1e-3)
    module = ExtractorModule(
        extractor, TripletLossWithMiner(0.1, AllTripletsMiner()), optimizer,
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5), scheduler_interval="step",
    )  # fmt: skip
    sampler = BalanceSampler(train.get_labels(), n_labels=2, n_instances=3)
    loaders, callbacks = [], []
    for at in range(2):
        dataset = DatasetQueryGallery(held, dataset_root=work, transform=transform)
        loaders.append(DataLoader(dataset, batch_size=3))
        callbacks.append(MetricValCallback(metric=EmbeddingMetrics(dataset), log_images=False, loader_idx=at))
    fit = {"train_dataloaders": DataLoader(train, batch_sampler=sampler), "val_dataloaders": loaders}
    arguments = {"max_epochs": 3, "callbacks": callbacks, "logger": False, "num_sanity_val_steps": 0}
    return Pieces(module, fit, {**arguments, "enable_checkpointing": False}, {"validate": {"dataloaders": loaders}})
