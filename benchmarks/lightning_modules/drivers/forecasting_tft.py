"""sktime/pytorch-forecasting: TemporalFusionTransformer, on made-up series."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pieces import Pieces


def build(pl: Any, work: Path) -> Pieces:
    """After the repository's tutorial, smaller: quantile loss, early stopping, clipped gradients."""
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
    from pytorch_forecasting.data import GroupNormalizer
    from pytorch_forecasting.metrics import QuantileLoss

    draw = np.random.default_rng(0)
    series = (
        pd.DataFrame(
            {
                "time_idx": np.arange(40),
                "group": str(group),
                "price": draw.random(40),
                "value": 2 + np.sin(np.arange(40) / 3 + group) + 0.1 * draw.random(40),
            }
        )
        for group in range(4)
    )
    frame = pd.concat(series, ignore_index=True)
    training = TimeSeriesDataSet(
        frame[frame.time_idx < 34],
        time_idx="time_idx", target="value", group_ids=["group"], min_encoder_length=6, max_encoder_length=12,
        max_prediction_length=4, static_categoricals=["group"], time_varying_known_reals=["time_idx", "price"],
        time_varying_unknown_reals=["value"], target_normalizer=GroupNormalizer(groups=["group"]),
        add_relative_time_idx=True, add_target_scales=True, add_encoder_length=True,
    )  # fmt: skip
    validation = TimeSeriesDataSet.from_dataset(training, frame, predict=True, stop_randomization=True)
    module = TemporalFusionTransformer.from_dataset(
        training, learning_rate=0.03, hidden_size=8, attention_head_size=1, dropout=0.1, hidden_continuous_size=4,
        loss=QuantileLoss(), log_interval=-1, reduce_on_plateau_patience=1, optimizer="adam",
    )  # fmt: skip
    fit = {
        "train_dataloaders": training.to_dataloader(train=True, batch_size=16, num_workers=0),
        "val_dataloaders": validation.to_dataloader(train=False, batch_size=16, num_workers=0),
    }
    callbacks = [
        pl.callbacks.EarlyStopping(monitor="val_loss", min_delta=1e-4, patience=2, mode="min"),
        pl.callbacks.LearningRateMonitor(),
    ]
    arguments = {"max_epochs": 3, "gradient_clip_val": 0.1, "limit_train_batches": 4, "callbacks": callbacks}
    return Pieces(
        module,
        fit,
        {**arguments, "logger": pl.loggers.CSVLogger(str(work)), "log_every_n_steps": 1},
        {"test": {"dataloaders": fit["val_dataloaders"]}},
    )
