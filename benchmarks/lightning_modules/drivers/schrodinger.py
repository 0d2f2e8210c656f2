"""kommodeskab/Andreas-Bachelor: TRDSB (a Schroedinger bridge) and its datamodule, on points in the plane.

The repository's package imports torchaudio for another data set; an empty module stands for it.
"""

from __future__ import annotations

import functools
import sys
import types
from pathlib import Path
from typing import Any

import torch
from pieces import Pieces


def build(pl: Any, work: Path) -> Pieces:
    """Small networks; the direction of training turns after six updates, which skips the rest of an epoch."""
    sys.modules["torchaudio"] = types.ModuleType("torchaudio")
    from src.data_modules import BaseDSBDM
    from src.lightning_modules.reparameterized_dsb import TRDSB
    from src.networks.simple_models import SimpleNetwork

    class Points(torch.utils.data.Dataset[torch.Tensor]):
        def __init__(self, shift: float) -> None:
            self.values = torch.randn(64, 2) * 0.2 + shift

        def __len__(self) -> int:
            return len(self.values)

        def __getitem__(self, index: int) -> torch.Tensor:
            return self.values[index]

    data = BaseDSBDM(Points(-1.0), Points(1.0), train_val_split=0.75, batch_size=8, num_workers=1)
    module = TRDSB(
        forward_model=SimpleNetwork(2, 2, 10),
        backward_model=SimpleNetwork(2, 2, 10),
        optimizer=functools.partial(torch.optim.Adam, lr=1e-3),
        scheduler=functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=1),
        max_gamma=0.1,
        min_gamma=0.01,
        num_steps=4,
        cache_max_size=2,
        cache_num_iters=2,
        max_iterations=[9],
        min_iterations=[0],
        max_norm=1.0,
        lr_multiplier=0.9,
    )
    arguments = {
        "max_epochs": 6,
        "reload_dataloaders_every_n_epochs": 1,
        "logger": pl.loggers.CSVLogger(str(work)),
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
    }
    return Pieces(module, {"datamodule": data}, arguments)
