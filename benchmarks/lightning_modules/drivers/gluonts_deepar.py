"""awslabs/gluonts: DeepAR's LightningModule with the repository's own loaders, on made-up series."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pieces import Pieces


def build(pl: Any, work: Path) -> Pieces:
    """What DeepAREstimator.train_model does before it calls its Trainer, with 8 batches an epoch."""
    from gluonts.dataset.common import ListDataset
    from gluonts.torch.model.deepar import DeepAREstimator

    draw = np.random.default_rng(0)
    series = [
        {"target": 5 + np.sin(np.arange(80) / 4) + 0.1 * draw.random(80), "start": pd.Period("2024-01-01", "h")}
        for _ in range(6)
    ]
    estimator = DeepAREstimator(
        freq="h",
        prediction_length=4,
        context_length=12,
        hidden_size=8,
        num_layers=1,
        batch_size=8,
        num_batches_per_epoch=8,
        lags_seq=[1, 2, 3],
        lr=1e-2,
    )
    data = estimator.create_transformation().apply(ListDataset(series, freq="h"), is_train=True)
    module = estimator.create_lightning_module()
    train = estimator.create_training_data_loader(data, module)
    val = estimator.create_validation_data_loader(data, module)
    callbacks = [
        pl.callbacks.ModelCheckpoint(dirpath=work / "checkpoints", monitor="val_loss", mode="min", verbose=True)
    ]
    arguments = {"max_epochs": 3, "gradient_clip_val": 10.0, "callbacks": callbacks, "logger": False}
    return Pieces(module, {"train_dataloaders": train, "val_dataloaders": val}, arguments)
