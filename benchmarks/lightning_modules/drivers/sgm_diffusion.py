"""Stability-AI/generative-models: DiffusionEngine with its own UNet, denoiser and sampler, on made-up digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pieces import Pieces

PLACE = "sgm.modules.diffusionmodules"


def build(pl: Any, work: Path) -> Pieces:
    """After the repository's configs/example_training/toy/mnist.yaml, smaller, with EMA and a warm-up schedule."""
    from sgm.models.diffusion import DiffusionEngine

    discretization = {"target": f"{PLACE}.discretizer.EDMDiscretization"}
    module = DiffusionEngine(
        network_config={
            "target": f"{PLACE}.openaimodel.UNetModel",
            "params": {
                "in_channels": 1,
                "out_channels": 1,
                "model_channels": 32,
                "attention_resolutions": [],
                "num_res_blocks": 1,
                "channel_mult": [1, 2],
                "num_head_channels": 16,
            },
        },
        denoiser_config={
            "target": f"{PLACE}.denoiser.Denoiser",
            "params": {
                "scaling_config": {"target": f"{PLACE}.denoiser_scaling.EDMScaling", "params": {"sigma_data": 1.0}}
            },
        },
        first_stage_config={"target": "sgm.models.autoencoder.IdentityFirstStage"},
        sampler_config={
            "target": f"{PLACE}.sampling.EulerEDMSampler",
            "params": {"num_steps": 5, "discretization_config": discretization},
        },
        scheduler_config={
            "target": "sgm.lr_scheduler.LambdaLinearScheduler",
            "params": {
                "warm_up_steps": [5],
                "cycle_lengths": [1000],
                "f_start": [1e-6],
                "f_max": [1.0],
                "f_min": [0.5],
            },
        },
        loss_fn_config={
            "target": f"{PLACE}.loss.StandardDiffusionLoss",
            "params": {
                "loss_weighting_config": {
                    "target": f"{PLACE}.loss_weighting.EDMWeighting",
                    "params": {"sigma_data": 1.0},
                },
                "sigma_sampler_config": {"target": f"{PLACE}.sigma_sampling.EDMSampling"},
            },
        },
        use_ema=True,
        input_key="jpg",
    )
    module.learning_rate = 1e-3
    images = [{"jpg": image} for image in torch.rand(64, 1, 16, 16) * 2 - 1]
    loader = torch.utils.data.DataLoader(images, batch_size=8, shuffle=True)  # type: ignore[arg-type]
    monitor = pl.callbacks.LearningRateMonitor(logging_interval="step")
    logger = pl.loggers.CSVLogger(str(work))
    arguments = {"max_epochs": 2, "logger": logger, "callbacks": [monitor], "log_every_n_steps": 1}
    return Pieces(module, {"train_dataloaders": loader}, arguments)
