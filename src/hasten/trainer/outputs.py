"""Reads the output of `training_step`: its loss, and the outputs that hooks get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hasten.trainer.errors import misconfigured


def loss_of(output: Any) -> Any:
    """Return the loss in the output of training_step; None means that the batch is skipped.

    Raises:
        HastenError: The output is neither a tensor, nor a dict with "loss", nor None.
    """
    if output is None or isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if isinstance(output, Mapping):
        raise misconfigured(
            "when training_step returns a dict, the 'loss' key needs to be present",
            f"it returned {', '.join(map(repr, output)) or 'an empty dict'}; return {{'loss': loss, ...}}",
        )
    raise misconfigured(
        f"training_step gave a {type(output).__name__}: it must return a Tensor, a dict, or None (to skip the batch)"
    )


def scaled_loss(output: Any, every: int) -> Any:
    """Return the loss as differentiated: divided by the number of accumulated batches."""
    loss = loss_of(output)
    return loss if loss is None or every == 1 else loss / every


def outputs_of(output: Any, every: int) -> dict[str, Any]:
    """Return the outputs that hooks get: the loss as differentiated, detached, and the other entries of the output."""
    loss = scaled_loss(output, every)
    if loss is None:
        return {}
    if not isinstance(output, Mapping):
        return {"loss": loss.detach()}
    return {"loss": loss.detach(), **{key: value for key, value in output.items() if key != "loss"}}


def manual_outputs_of(output: Any, every: int) -> dict[str, Any]:
    """Return the outputs that hooks get in manual optimization: all entries of the output, detached."""
    if isinstance(output, Mapping):
        return {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in output.items()}
    return {} if output is None else {"loss": output.detach()}
