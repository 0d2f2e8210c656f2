"""Checks that flags, model and optimizers are the same on all ranks, as text compared before the first step.

Ranks that differ would wait for each other forever, or their weights would drift apart silently.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hasten.parallel import refuse_unlike

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer

# Flags that decide how often ranks communicate, and what an optimizer step does. Flags that may differ between ranks
# are left out: the seed, the progress bar, the loggers.
_FLAGS = (
    "precision", "max_epochs", "min_epochs", "max_steps", "min_steps", "limit_train_batches", "limit_val_batches",
    "overfit_batches", "fast_dev_run", "reload_dataloaders_every_n_epochs", "val_check_interval",
    "check_val_every_n_epoch", "num_sanity_val_steps", "accumulate_grad_batches", "microbatch", "optimizer_in_backward",
    "gradient_clip_val", "gradient_clip_algorithm",
)  # fmt: skip
_PLAIN = (int, float, bool, str, type(None))


def check_model(trainer: Trainer) -> None:
    """Raise if flags or parameters differ between ranks.

    Raises:
        HastenError: They differ; the message shows where.
    """
    if trainer.world.size == 1:
        return
    config = trainer.config
    flags = "\n".join(f"{name}={_plain(getattr(config, name))}" for name in _FLAGS)
    parameters = "\n".join(_described(name, parameter) for name, parameter in trainer.model.named_parameters())
    refuse_unlike(trainer.world, {"Trainer's flags": flags, "model": parameters})


def check_optimizers(trainer: Trainer, optimizers: Iterable[Any]) -> None:
    """Raise if optimizers differ between ranks: with another learning rate, say, their weights would drift apart.

    Raises:
        HastenError: They differ; the message shows where.
    """
    if trainer.world.size == 1:
        return
    lines = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            options = ", ".join(f"{name}={_plain(value)}" for name, value in group.items() if name != "params")
            lines.append(f"{type(optimizer).__name__}: {len(group['params'])} parameters, {options}")
    refuse_unlike(trainer.world, {"optimizer": "\n".join(lines)})


def _described(name: str, parameter: torch.Tensor) -> str:
    """Return a line with a parameter's name, shape and dtype."""
    shape = "of a shape not known yet" if nn.parameter.is_lazy(parameter) else tuple(parameter.shape)
    return f"{name} {shape} {parameter.dtype}" + ("" if parameter.requires_grad else ", frozen")


def _plain(value: Any) -> str:
    """Return a value as text that is the same in every process; "..." for objects, whose repr has addresses."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_plain, value))})"
    return repr(value) if isinstance(value, _PLAIN) else "..."
