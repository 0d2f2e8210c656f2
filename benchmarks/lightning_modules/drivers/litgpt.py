"""tomogwen/LitGPT: LitMinGPT and TinyShakespeareDataModule, on a short made-up text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pieces import Pieces


def build(pl: Any, work: Path) -> Pieces:
    """A small minGPT, 24 optimizer steps of two batches each, validated twice an epoch."""
    from litgpt.data import TinyShakespeareDataModule
    from litgpt.model import LitMinGPT

    text = "".join(f"Line {number} of a play: to be or not to be, {number * 7 % 13} times.\n" for number in range(60))
    (work / "play.txt").write_text(text)
    data = TinyShakespeareDataModule(
        dataset_path=str(work / "play.txt"),
        batch_size=64,
        train_test_split=0.9,
        train_dataloader_workers=1,
        val_dataloader_workers=1,
        block_size=32,
    )
    module = LitMinGPT(
        vocab_size=len(set(text)),
        n_embd=32,
        n_heads=2,
        num_blocks=2,
        batch_size=64,
        block_size=32,
        dropout=0.2,
        lr=1e-3,
    )
    arguments = {"max_steps": 24, "accumulate_grad_batches": 2, "val_check_interval": 0.5, "log_every_n_steps": 5}
    return Pieces(module, {"datamodule": data}, {**arguments, "logger": pl.loggers.CSVLogger(str(work))})
