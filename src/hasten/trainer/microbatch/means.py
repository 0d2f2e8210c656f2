"""Whether a loss is a mean over samples, without which its parts do not add up to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from hasten.errors import is_out_of_memory
from hasten.trainer.microbatch.before import Before, versions
from hasten.trainer.outputs import loss_of

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer

_ROUNDING = 2e-3  # of float32, TF32 included; a mean over tokens in place of samples is off by more
_ROUNDING_16 = 3e-2
_RANDOM = 0.4  # what a step that draws numbers itself makes of it; a sum in place of a mean is off by half

Called = Callable[[Any, int], Any]


def wrong(trainer: Trainer, before: Before, step: Called, batch: Any, halves: list[Any], shares: list[float]) -> str:
    """Return what is wrong with a loss, or a step, that is to be computed in parts; "" if nothing is.

    The loss of some samples is compared with that of their halves, without gradients; whoever calls puts random states,
    buffers and metrics back.

    Args:
        trainer: Whose module it is.
        before: Has just kept what the step stands on.
        step: `(batch, batch_idx)` -> what training_step gives.
        batch: Some samples.
        halves: The same in two parts.
        shares: How much the loss of each counts.
    """
    module = trainer.model
    parameters = versions(module.parameters())
    buffers = {name: buffer._version for name, buffer in module.named_buffers()}
    try:
        with torch.no_grad(), _resting(module):
            together = _loss(step(batch, 0))
            draws = before.drawn()
            before.draw_again()
            apart = [_loss(step(half, 0)) for half in halves]
    except Exception as error:
        if is_out_of_memory(error):  # the parts will be smaller; how they add up is then not known
            return ""
        raise
    if versions(module.parameters()) != parameters:
        return "training_step changes weights itself, which it would do once for each part"
    changed = [name for name, buffer in module.named_buffers() if buffer._version != buffers.get(name)]
    if changed:
        trainer.say(f"microbatch: {', '.join(changed[:3])} change with each part, not once a batch", once=True)
    if together is None or any(loss is None for loss in apart):
        return ""
    summed = sum(loss * share for loss, share in zip(apart, shares, strict=True) if loss is not None)
    sixteen = "16" in str(trainer.config.precision)
    allowed = _RANDOM if draws else _ROUNDING_16 if sixteen else _ROUNDING
    if abs(summed - together) <= allowed * max(abs(summed), abs(together)) + 1e-6:
        return ""
    return (
        f"the loss of a few samples is {together:.4g}, the mean over their halves {summed:.4g}: training_step does not"
        " return a mean over samples"
    )


@contextlib.contextmanager
def _resting(module: torch.nn.Module) -> Iterator[None]:
    """Let BatchNorm and dropout rest, in which samples differ by who is beside them, and by chance."""
    resting = [part for part in module.modules() if isinstance(part, _BatchNorm | _DropoutNd) and part.training]
    for part in resting:
        part.training = False
    try:
        yield
    finally:
        for part in resting:
            part.training = True


def _loss(output: Any) -> float | None:
    loss = loss_of(output)
    return None if loss is None else float(loss)
