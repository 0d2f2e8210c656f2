"""Run training steps under DistributedDataParallel (DDP), and explain its errors.

DDP prepares its reducer in `forward`, and expects one backward after it. `Step` makes a whole training step that
forward. `manual_forward` and `before_backward` serve steps that call backward themselves; `Exchange` serves steps
whose backward runs in parts.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hasten.errors import HastenError
from hasten.parallel.flat import copy_back, pieces
from hasten.parallel.world import World

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


class Step(nn.Module):
    """Module whose forward is a user's whole training step, which DistributedDataParallel can wrap.

    Args:
        module: Owner of the parameters.
        call: Function of a step, such as `module.training_step`; may be replaced at any time.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `call` returns."""
        return self.call(*args, **kwargs)


def wrap(
    module: nn.Module,
    call: Callable[..., Any],
    world: World,
    **options: Any,
) -> DistributedDataParallel:
    """Return a module to call in place of `call`; its backward averages the gradients over the ranks.

    Broadcasts rank 0's parameters and buffers to all ranks. The module must be on its device already.

    Args:
        module: Owner of the parameters; at least one must require a gradient.
        call: Forward and loss of a step, such as `module.training_step`.
        world: More than one rank.
        **options: Options of DistributedDataParallel; `gradient_as_bucket_view` is on by default.

    Raises:
        HastenError: No parameter requires a gradient.
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
        **{"gradient_as_bucket_view": True, **options},
    )


class Exchange:
    """Controls what ranks exchange in a step whose backward runs in parts, each of which may fail and be repeated.

    DistributedDataParallel averages gradients within a backward; if a rank fails there, the others wait for it forever.
    So parts exchange nothing here, and `end` averages the gradients once all ranks have finished.

    Args:
        ddp: The wrapped model.
        world: Its ranks.
    """

    def __init__(self, ddp: DistributedDataParallel, world: World) -> None:
        self._ddp, self._world = ddp, world
        self._parameters = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        self._syncs_gradients = self._sends_buffers = False

    def begin(self) -> None:
        """Begin a step: turn gradient averaging off. The first forward still broadcasts buffers, as without parts."""
        self._syncs_gradients = self._ddp.require_backward_grad_sync
        self._sends_buffers = self._ddp.require_forward_param_sync
        self._ddp.require_backward_grad_sync = False

    def restart(self) -> None:
        """Begin the step again: the next forward broadcasts buffers, if the first one did."""
        self._ddp.require_forward_param_sync = self._sends_buffers

    def last(self) -> None:
        """Make the next backward, the step's last, average the gradients, if this step averages any."""
        self._ddp.require_backward_grad_sync = self._syncs_gradients

    @contextlib.contextmanager
    def nothing(self) -> Iterator[None]:
        """Return a context in which forwards exchange nothing."""
        ddp = self._ddp
        before = ddp.require_backward_grad_sync, ddp.require_forward_param_sync
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = False
        try:
            yield
        finally:
            ddp.require_backward_grad_sync, ddp.require_forward_param_sync = before

    def agree(self, number: int) -> tuple[int, list[bool]]:
        """Return the minimum of all ranks' numbers, and for each parameter whether any rank has its gradient."""
        # Negated, so that one "min" serves both: -1 wins where any rank has a gradient.
        have = [-int(parameter.grad is not None) for parameter in self._parameters]
        smallest = self._world.reduce(torch.tensor([number, *have]), "min").tolist()
        return int(smallest[0]), [bool(flag) for flag in smallest[1:]]

    def end(self, have: list[bool]) -> None:
        """End the step on all ranks: average the gradients, if this step averages any.

        Args:
            have: Whether any rank has a gradient, by parameter, from `agree`.
        """
        self._ddp.require_backward_grad_sync = self._syncs_gradients
        if not self._syncs_gradients:
            return
        self._ddp.require_forward_param_sync = True
        gradients = []
        for parameter, any_rank in zip(self._parameters, have, strict=True):
            if not any_rank:
                continue
            if parameter.grad is None:  # unused on this rank only; DDP under find_unused_parameters also counts it as 0
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        average(gradients, self._world)


_AT_ONCE = 25 * 2**20  # bytes per all-reduce, as in DistributedDataParallel


def average(gradients: list[torch.Tensor], world: World, group: Any = None) -> None:
    """Average gradients over the ranks, in place.

    Args:
        gradients: Gradients, in the same order, shapes and dtypes on all ranks.
        world: World whose size the sums are divided by.
        group: Process group of the ranks; None: all ranks.

    Raises:
        HastenError: A gradient is sparse.
    """
    import torch.distributed as dist

    if any(gradient.is_sparse for gradient in gradients):
        raise HastenError("sparse gradients of several ranks cannot be averaged here", "use dense embeddings")
    for bucket in pieces(gradients, _AT_ONCE):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        flat.mul_(1.0 / world.size)  # before the sum, as DistributedDataParallel does, for the same bits
        dist.all_reduce(flat, group=group)
        copy_back(flat, bucket)


def with_gradients(module: nn.Module, world: World) -> list[tuple[str, nn.Parameter]]:
    """Return the (name, parameter) pairs that have a gradient on any rank; a collective."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    have = world.reduce(torch.tensor([parameter.grad is not None for _, parameter in named], dtype=torch.uint8), "max")
    return [pair for pair, somewhere in zip(named, have.tolist(), strict=True) if somewhere]


def manual_forward(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    """Run a step that calls backward itself, any number of times, with `before_backward` before each."""
    sync, ddp.require_backward_grad_sync = ddp.require_backward_grad_sync, False
    try:
        output = ddp(*args, **kwargs)
    finally:
        ddp.require_backward_grad_sync = sync
    # Raises if the last backward left gradients unaveraged. torch checks that in the next forward, which may not come.
    ddp._check_reducer_finalized()
    return output


def before_backward(ddp: DistributedDataParallel, loss: torch.Tensor) -> None:
    """Prepare DDP to average the gradients of one backward inside a step.

    A backward that reaches only some of the parameters (as in a GAN) needs find_unused_parameters=True.
    """
    # DistributedDataParallel does this at the end of its forward, when the backwards inside such a step are over.
    ddp.require_forward_param_sync = True
    ddp.reducer.prepare_for_backward([loss] if ddp.find_unused_parameters and not ddp.static_graph else [])


def explained(ddp: DistributedDataParallel, error: BaseException) -> HastenError | None:
    """Return an error that explains torch's error about a step's parameters, with a fix; None for other errors."""
    text = str(error)
    if "Your training graph has changed in this iteration" in text:
        return HastenError(
            "static_graph=True, but a step uses other parameters than the first one did, or in another way.",
            "Leave static_graph out; where a step leaves parameters out, use find_unused_parameters=True.",
            code=1,
        )
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
    """Return the model with BatchNorm statistics over all ranks (SyncBatchNorm); unchanged if there is one rank.

    Raises:
        HastenError: The device is a CPU, for which torch has no such layer.
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
