"""Wraps a training step in DistributedDataParallel, and says what its errors mean."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hasten.errors import HastenError
from hasten.parallel.world import World

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


class Step(nn.Module):
    """A module whose forward is a training step of the user's, so that DistributedDataParallel sees the whole of it.

    Args:
        module: Owns the parameters.
        call: What a step calls, such as `module.training_step`; may be replaced at any time.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `call` returns."""
        return self.call(*args, **kwargs)


def wrap(
    module: nn.Module,
    call: Callable[..., Any],
    world: World,
    *,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    gradient_as_bucket_view: bool = True,
    **options: Any,
) -> DistributedDataParallel:
    """Let the gradients of `module` be averaged over the ranks while its backward runs.

    Call what is returned in place of `call`, and backward as ever. The module must be on its device already. Rank 0's
    parameters and buffers go to all ranks.

    Args:
        module: Owns the parameters; at least one must require a gradient.
        call: A step: its forward and loss, such as `module.training_step`.
        world: Of more than one rank.
        find_unused_parameters: Some parameters take no part in some steps; costs a walk of the graph each step.
        static_graph: Each step uses the same parameters, in the same way; allows reentrant checkpointing.
        gradient_as_bucket_view: Gradients live in the buffers that are sent: saves their memory once.
        **options: Any other of DistributedDataParallel's.
    """
    from torch.nn.parallel import DistributedDataParallel

    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise HastenError(
            f"{type(module).__name__} has no parameter that requires a gradient: several ranks have nothing to share.",
            "Unfreeze some parameters, or use devices=1.",
        )
    return DistributedDataParallel(
        Step(module, call),
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        find_unused_parameters=find_unused_parameters,
        static_graph=static_graph,
        gradient_as_bucket_view=gradient_as_bucket_view,
        **options,
    )


def set_sync(ddp: DistributedDataParallel, sync: bool) -> None:
    """Whether the next steps, forward and backward, average gradients; off while they are only accumulated.

    What `ddp.no_sync()` does, without entering a context each step.
    """
    ddp.require_backward_grad_sync = sync


def manual_forward(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    """A step that calls backward itself, any number of times; `before_backward` goes before each."""
    sync, ddp.require_backward_grad_sync = ddp.require_backward_grad_sync, False
    try:
        return ddp(*args, **kwargs)
    finally:
        ddp.require_backward_grad_sync = sync


def before_backward(ddp: DistributedDataParallel, loss: torch.Tensor) -> None:
    """Make ready to average the gradients of one backward inside of a step.

    A backward that reaches only some of the parameters (a GAN's) needs find_unused_parameters=True.
    """
    # Where DistributedDataParallel itself would do this, in forward, such a step's backwards are over already.
    ddp.require_forward_param_sync = True
    ddp.reducer.prepare_for_backward([loss] if ddp.find_unused_parameters and not ddp.static_graph else [])


def explained(ddp: DistributedDataParallel, error: BaseException) -> HastenError | None:
    """The error that says which parameters torch misses in a step, and what to do; None if it is another."""
    text = str(error)
    if "Expected to have finished reduction in the prior iteration" not in text:
        return None
    names = [name for name, parameter in ddp.module.named_parameters() if parameter.requires_grad]
    listed = re.search(r"did not receive grad for rank (\d+)\s*:([\d\s]+)", text)
    missed = [
        names[index].removeprefix("module.")
        for index in map(int, listed[2].split() if listed else ())
        if index < len(names)
    ]
    which = ", ".join(missed[:8]) + (f" and {len(missed) - 8} more" if len(missed) > 8 else "")
    return HastenError(
        f"Parameters that took no part in the loss of the last step on rank {listed[1] if listed else '?'}: "
        f"{which or 'torch does not say which'}. Ranks wait for the gradient of every parameter.",
        'If that is meant, use strategy="ddp_find_unused_parameters_true"; else use them in the loss, or freeze them '
        "with requires_grad_(False). A training_step that returns None on some ranks does this too.",
        code=1,
    )


def sync_batchnorm(model: nn.Module, world: World) -> nn.Module:
    """The model with its BatchNorm layers counting over all ranks; as it was when alone.

    Raises:
        HastenError: On a CPU, where torch has no such layer.
    """
    if world.size == 1:
        return model
    if world.device.type == "cpu":
        raise HastenError(
            "sync_batchnorm=True, but torch's SyncBatchNorm runs on GPUs only.",
            "Leave it off on the CPU: each rank's BatchNorm then counts its own share of the batch.",
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted
