"""Facts that must be the same on all ranks of a training, as text that ranks compare before the first step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hasten.parallel import refuse_unlike

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer

# What decides how often ranks meet, and what an optimizer's step does. Not among them is what one rank may have of its
# own: a seed, a progress bar, a logger.
_FLAGS = (
    "precision", "max_epochs", "min_epochs", "max_steps", "min_steps", "limit_train_batches", "limit_val_batches",
    "overfit_batches", "fast_dev_run", "reload_dataloaders_every_n_epochs", "val_check_interval",
    "check_val_every_n_epoch", "num_sanity_val_steps", "accumulate_grad_batches", "microbatch", "optimizer_in_backward",
    "gradient_clip_val", "gradient_clip_algorithm",
)  # fmt: skip
_PLAIN = (int, float, bool, str, type(None))


def check_model(trainer: Trainer) -> None:
    """Refuse ranks whose flags or parameters differ, before any of them waits for another.

    Raises:
        HastenError: They differ; says where.
    """
    if trainer.world.size == 1:
        return
    config = trainer.config
    flags = "\n".join(f"{name}={_plain(getattr(config, name))}" for name in _FLAGS)
    parameters = "\n".join(_described(name, one) for name, one in trainer.model.named_parameters())
    refuse_unlike(trainer.world, {"Trainer's flags": flags, "model": parameters})


def check_optimizers(trainer: Trainer, optimizers: Iterable[Any]) -> None:
    """Refuse ranks whose optimizers differ: each steps by its own rate, so their weights would drift apart.

    Raises:
        HastenError: They differ; says where.
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
    shape = "of a shape not known yet" if nn.parameter.is_lazy(parameter) else tuple(parameter.shape)
    return f"{name} {shape} {parameter.dtype}" + ("" if parameter.requires_grad else ", frozen")


def _plain(value: Any) -> str:
    """A value that is the same text in every process; "..." for objects."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_plain, value))})"
    return repr(value) if isinstance(value, _PLAIN) else "..."
