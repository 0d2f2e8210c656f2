"""Refuse trainings whose steps cannot be computed in microbatches with the same result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hasten.trainer.errors import misconfigured
from hasten.trainer.feeding import draws_batches

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer


def refuse(trainer: Trainer) -> None:
    """Raise where the parts of a batch would not give the result of the whole batch.

    Raises:
        HastenError: The message says why, and what to do.
    """
    flag, module = trainer.config.microbatch, trainer.model
    shown = f"microbatch={flag!r}"
    if isinstance(trainer.engine.optimizing.optimizers[0], torch.optim.LBFGS):
        raise misconfigured(
            f"{shown}: LBFGS computes the whole batch several times within a step, and searches along the loss",
            "use another optimizer, or a smaller batch_size",
        )
    if draws_batches(module.training_step):
        raise misconfigured(
            f"{shown}: training_step takes dataloader_iter, so the Trainer never sees its batches", "take the batch"
        )
    if flag == "auto" and trainer.config.precision == "16-mixed" and trainer.world.size > 1:
        raise misconfigured(
            f'{shown} and precision="16-mixed" on several ranks: an overflow on one rank would reach the others unseen',
            'use precision="bf16-mixed", or give microbatch a number',
        )
    norms = [name for name, part in module.named_modules() if isinstance(part, _BatchNorm) and part.training]
    if not norms:
        return
    norm = f"{norms[0]}{f' and {len(norms) - 1} more' if len(norms) > 1 else ''}"
    if flag == "auto":
        raise misconfigured(
            f"{shown}: BatchNorm ({norm}) counts over the samples that are computed together, so how much memory there"
            " is would change the result",
            "say how many samples: microbatch=32; or use GroupNorm or LayerNorm, or put BatchNorm into eval mode",
        )
    trainer.say(f"{shown}: BatchNorm ({norm}) counts over {flag} samples, not over the whole batch", once=True)
