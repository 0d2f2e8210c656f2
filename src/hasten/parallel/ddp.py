"""Wraps a training step in DistributedDataParallel, and says what its errors mean."""

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
        """Return what `call` returns."""
        return self.call(*args, **kwargs)


def wrap(
    module: nn.Module,
    call: Callable[..., Any],
    world: World,
    **options: Any,
) -> DistributedDataParallel:
    """Let the gradients of `module` be averaged over the ranks while its backward runs.

    Call what is returned in place of `call`, and backward as usual. The module must be on its device already. Rank 0's
    parameters and buffers go to all ranks.

    Args:
        module: Owns the parameters; at least one must require a gradient.
        call: A step: its forward and loss, such as `module.training_step`.
        world: Of more than one rank.
        **options: Those of DistributedDataParallel; `gradient_as_bucket_view` is on unless it is given.
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
    """What ranks exchange in a step whose backward runs in parts, each of which may fail and be done again.

    DistributedDataParallel averages gradients within a backward; a rank that fails in one leaves the others waiting. So
    here parts exchange nothing, and `average` does it once all ranks are through.

    Args:
        ddp: The wrapped model.
        world: Its ranks.
    """

    def __init__(self, ddp: DistributedDataParallel, world: World) -> None:
        self._ddp, self._world = ddp, world
        self._parameters = [one for one in ddp.module.parameters() if one.requires_grad]
        self._wanted = self._sends_buffers = False

    def begin(self) -> None:
        """Let the parts that follow exchange nothing but buffers, with the first forward, as without parts."""
        self._wanted = self._ddp.require_backward_grad_sync
        self._sends_buffers = self._ddp.require_forward_param_sync
        self._ddp.require_backward_grad_sync = False

    def again(self) -> None:
        """Begin once more: the next forward exchanges what the first one did."""
        self._ddp.require_forward_param_sync = self._sends_buffers

    def last(self) -> None:
        """The next backward is the step's last one: it averages the gradients, if the step is one that does."""
        self._ddp.require_backward_grad_sync = self._wanted

    @contextlib.contextmanager
    def nothing(self) -> Iterator[None]:
        """Forwards under this exchange nothing at all."""
        ddp = self._ddp
        before = ddp.require_backward_grad_sync, ddp.require_forward_param_sync
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = False
        try:
            yield
        finally:
            ddp.require_backward_grad_sync, ddp.require_forward_param_sync = before

    def agree(self, number: int) -> tuple[int, list[bool]]:
        """Return the least of all ranks' numbers, and which parameters have a gradient on any rank."""
        have = [-int(one.grad is not None) for one in self._parameters]
        least = self._world.reduce(torch.tensor([number, *have]), "min").tolist()
        return int(least[0]), [bool(one) for one in least[1:]]

    def end(self, have: list[bool]) -> None:
        """All ranks are through: average the gradients, if the step is one that does."""
        self._ddp.require_backward_grad_sync = self._wanted
        if not self._wanted:
            return
        self._ddp.require_forward_param_sync = True
        gradients = []
        for parameter, any_rank in zip(self._parameters, have, strict=True):
            if not any_rank:
                continue
            if parameter.grad is None:  # it took no part here, as under find_unused_parameters
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        average(gradients, self._world)


_AT_ONCE = 25 * 2**20  # bytes sent in one go, as DistributedDataParallel does


def average(gradients: list[torch.Tensor], world: World, group: Any = None) -> None:
    """Average gradients over the ranks, in place.

    Args:
        gradients: The same on all ranks, in order, shape and type.
        world: The ranks; its size is theirs.
        group: Their process group; None: all there are.

    Raises:
        HastenError: One is sparse.
    """
    import torch.distributed as dist

    if any(gradient.is_sparse for gradient in gradients):
        raise HastenError("sparse gradients of several ranks cannot be averaged here", "use dense embeddings")
    for bucket in pieces(gradients, _AT_ONCE):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        flat.mul_(1.0 / world.size)  # before the sum, as DistributedDataParallel does: the same bits
        dist.all_reduce(flat, group=group)
        copy_back(flat, bucket)


def with_gradients(module: nn.Module, world: World) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that have a gradient on any rank, with their names; a collective."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    have = world.reduce(torch.tensor([one.grad is not None for _, one in named], dtype=torch.uint8), "max")
    return [one for one, somewhere in zip(named, have.tolist(), strict=True) if somewhere]


def manual_forward(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    """A step that calls backward itself, any number of times; `before_backward` goes before each."""
    sync, ddp.require_backward_grad_sync = ddp.require_backward_grad_sync, False
    try:
        output = ddp(*args, **kwargs)
    finally:
        ddp.require_backward_grad_sync = sync
    ddp._check_reducer_finalized()  # of its last backward: there may be no other, which would notice
    return output


def before_backward(ddp: DistributedDataParallel, loss: torch.Tensor) -> None:
    """Make ready to average the gradients of one backward inside of a step.

    A backward that reaches only some of the parameters (a GAN's) needs find_unused_parameters=True.
    """
    # Where DistributedDataParallel itself would do this, in forward, such a step's backwards are over already.
    ddp.require_forward_param_sync = True
    ddp.reducer.prepare_for_backward([loss] if ddp.find_unused_parameters and not ddp.static_graph else [])


def explained(ddp: DistributedDataParallel, error: BaseException) -> HastenError | None:
    """Return what torch's error says of a step's parameters, and what to do; None if it is another error."""
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
