"""Stability-AI/generative-models: AutoencodingEngine with a discriminator, on made-up pictures.

The repository's own adversarial loss downloads VGG weights, so a small one stands here; it uses the repository's
discriminator and hinge loss. The engine takes its loss by name from its config, so nothing of it changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pieces import Pieces
from torch import nn
from torch.nn import functional


class HingeLoss(nn.Module):
    """Mean absolute error, KL and a hinge GAN loss, in the form the engine expects."""

    forward_keys = ("optimizer_idx", "global_step", "split", "regularization_log")

    def __init__(self) -> None:
        super().__init__()
        from sgm.modules.autoencoding.lpips.model.model import NLayerDiscriminator

        self.discriminator = NLayerDiscriminator(input_nc=3, ndf=8, n_layers=2)

    def get_trainable_parameters(self) -> Iterator[nn.Parameter]:
        """The discriminator's parameters: the engine's second optimizer."""
        return self.discriminator.parameters()

    def forward(
        self, inputs: Any, made: Any, optimizer_idx: int, global_step: int, split: str, regularization_log: Any
    ) -> tuple[Any, dict[str, Any]]:
        """The loss of the autoencoder (0) or of the discriminator (1), and what to log."""
        from sgm.modules.autoencoding.lpips.vqperceptual import hinge_d_loss

        if optimizer_idx == 1:
            loss = hinge_d_loss(self.discriminator(inputs.detach()), self.discriminator(made.detach()))
            return loss, {f"{split}/loss/disc": loss.clone().detach()}
        error = functional.l1_loss(made, inputs)
        loss = error + 1e-6 * regularization_log["kl_loss"] - 0.1 * self.discriminator(made).mean()
        return loss, {f"{split}/loss/total": loss.clone().detach(), f"{split}/loss/rec": error.detach()}


def build(pl: Any, work: Path) -> Pieces:
    """A tiny encoder and decoder, two optimizers in turn, three epochs.

    EMA is off: this commit makes its copy before the encoder exists, and fails.
    """
    from sgm.models.autoencoder import AutoencodingEngine

    network = {
        "attn_type": "none",
        "double_z": True,
        "z_channels": 4,
        "resolution": 16,
        "in_channels": 3,
        "out_ch": 3,
        "ch": 32,
        "ch_mult": [1, 2],
        "num_res_blocks": 1,
        "attn_resolutions": [],
        "dropout": 0.1,
    }
    module = AutoencodingEngine(
        encoder_config={"target": "sgm.modules.diffusionmodules.model.Encoder", "params": network},
        decoder_config={"target": "sgm.modules.diffusionmodules.model.Decoder", "params": network},
        loss_config={"target": "drivers.sgm_autoencoder.HingeLoss"},
        regularizer_config={"target": "sgm.modules.autoencoding.regularizers.DiagonalGaussianRegularizer"},
        monitor="val/loss/rec",
        input_key="jpg",
    )
    module.learning_rate = 1e-3
    images = [{"jpg": image} for image in torch.rand(40, 3, 16, 16) * 2 - 1]
    fit = {
        "train_dataloaders": torch.utils.data.DataLoader(images[:32], batch_size=4, shuffle=True),  # type: ignore[arg-type]
        "val_dataloaders": torch.utils.data.DataLoader(images[32:], batch_size=4),  # type: ignore[arg-type]
    }
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=work / "checkpoints", monitor=module.monitor, save_top_k=3)
    arguments = {"max_epochs": 3, "logger": pl.loggers.CSVLogger(str(work)), "callbacks": [checkpoint]}
    return Pieces(module, fit, {**arguments, "log_every_n_steps": 1})
