"""Reads the output of `training_step`: its loss, and what hooks get of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hasten.trainer.errors import misconfigured


def loss_of(output: Any) -> Any:
    """The loss in what training_step gave; None skips the batch.

    Raises:
        HastenError: It is neither a tensor, nor a dict with "loss", nor None.
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
    """The loss as it was differentiated."""
    loss = loss_of(output)
    return loss if loss is None or every == 1 else loss / every


def outputs_of(output: Any, every: int) -> dict[str, Any]:
    """Return what hooks get: the loss as it was differentiated, without its graph, and what else training_step gave."""
    loss = scaled_loss(output, every)
    if loss is None:
        return {}
    if not isinstance(output, Mapping):
        return {"loss": loss.detach()}
    return {"loss": loss.detach(), **{key: value for key, value in output.items() if key != "loss"}}


def manual_outputs_of(output: Any, every: int) -> dict[str, Any]:
    """Return what hooks get in manual optimization: all that training_step gave, without graphs."""
    if isinstance(output, Mapping):
        return {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in output.items()}
    return {} if output is None else {"loss": output.detach()}
