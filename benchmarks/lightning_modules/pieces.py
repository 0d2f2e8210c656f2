"""What a driver hands back: the repository's module, its data, and the arguments of the Trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Pieces:
    """Everything that is needed to train with any Trainer.

    Attributes:
        module: the repository's LightningModule.
        fit: arguments of `Trainer.fit` beside the module: `train_dataloaders`, `val_dataloaders` or `datamodule`.
        trainer: arguments of the Trainer. `run_one.py` adds CPU, one device, no progress bar, no model summary.
        after: what is called after `fit`, in order: "validate", "test" or "predict" -> their arguments
            (the module excepted).
    """

    module: Any
    fit: dict[str, Any]
    trainer: dict[str, Any]
    after: dict[str, dict[str, Any]] = field(default_factory=dict)
