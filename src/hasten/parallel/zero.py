"""ZeRO stage 1: each rank holds the optimizer state of its share of the parameters, and steps only those."""

from __future__ import annotations

import heapq
import weakref
from typing import Any

import torch

from hasten.errors import HastenError
from hasten.parallel.flat import copy_back
from hasten.parallel.world import World


class ShardedStates:
    """Shards one optimizer's work and state over the ranks, in place: the optimizer remains the script's own object.

    Before each step, a hook removes the gradients of other ranks' parameters, so that torch neither updates these nor
    creates state for them. After the step, each rank broadcasts the parameters it updated. The result is bitwise that
    of the unsharded optimizer, for optimizers that treat each parameter separately. (torch's ZeroRedundancyOptimizer
    would replace the optimizer that `configure_optimizers` returned, and lose its schedulers, parameter groups and
    fused kernels.)

    Args:
        optimizer: Optimizer of torch.optim; its gradients are the same on all ranks when it steps.
        world: More than one rank.

    Raises:
        HastenError: The optimizer computes across parameters, or is not one of torch's.
    """

    def __init__(self, optimizer: Any, world: World) -> None:
        kind = type(optimizer).__name__
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
            raise HastenError(
                f"shard_optimizer=True: {kind} looks at several parameters together, or is none of torch's.",
                "Use an optimizer that updates each parameter by itself, such as AdamW, or leave the option out.",
            )
        self._world = world
        self._optimizer = weakref.proxy(optimizer)
        self.owner = self._shares()
        self._set_aside: list[tuple[Any, Any]] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _parameters(self) -> list[Any]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _shares(self) -> list[int]:
        """Return the owning rank of each parameter: the largest first, each to the rank with the fewest elements."""
        parameters = self._parameters()
        owner = [0] * len(parameters)
        loads = [(0, rank) for rank in range(self._world.size)]
        for at in sorted(range(len(parameters)), key=lambda at: -parameters[at].numel()):
            load, rank = heapq.heappop(loads)
            owner[at] = rank
            heapq.heappush(loads, (load + parameters[at].numel(), rank))
        return owner

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Step pre-hook: remove other ranks' gradients, now or after the closure that computes them."""
        self._set_aside = []
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            self._take(optimizer)
            return None

        def closed() -> Any:
            loss = closure()
            self._take(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": closed}

    def _take(self, optimizer: Any) -> None:
        """Set the gradients of other ranks' parameters to None, and store them until the step is done.

        Raises:
            HastenError: A parameter group was added after the first step.
        """
        parameters = self._parameters()
        if len(parameters) != len(self.owner):  # a group was added, for a layer that is unfrozen later, say
            if any(optimizer.state[p] for p in parameters if p in optimizer.state):
                raise HastenError(
                    "shard_optimizer=True: a parameter group was added after the first step.",
                    "Give configure_optimizers all groups, the late ones with lr=0, or leave the option out.",
                )
            self.owner = self._shares()
        self._set_aside += [
            (parameter, parameter.grad)
            for parameter, rank in zip(parameters, self.owner, strict=True)
            if rank != self._world.rank and parameter.grad is not None
        ]
        for parameter, _ in self._set_aside:
            parameter.grad = None

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Step post-hook: restore the gradients, and broadcast updated parameters, one message per rank and dtype."""
        import torch.distributed as dist

        for parameter, gradient in self._set_aside:
            parameter.grad = gradient
        self._set_aside = []
        groups: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        for parameter, rank in zip(self._parameters(), self.owner, strict=True):
            if parameter.grad is not None:
                groups.setdefault((rank, parameter.dtype), []).append(parameter.detach())
        for (rank, _), tensors in sorted(groups.items(), key=lambda kind: (kind[0][0], str(kind[0][1]))):
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.broadcast(flat, rank)
            if rank != self._world.rank:
                copy_back(flat, tensors)

    # -- checkpoints -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the whole optimizer state on rank 0, this rank's part elsewhere; a collective."""
        import torch.distributed as dist

        world, full_state = self._world, self._optimizer.state_dict()
        states: dict[int, Any] = full_state["state"]
        gathered: list[Any] = [None] * world.size
        dist.all_gather_object(gathered, {at: _without_memory(state) for at, state in states.items()})
        for rank, shapes in enumerate(gathered[1:], start=1):
            for at, names in shapes.items():
                if world.rank == 0:
                    states[at] = {name: self._received(value, rank) for name, value in names.items()}
                elif world.rank == rank:
                    for value in states[at].values():
                        if isinstance(value, torch.Tensor):
                            dist.send(self._sent(value), 0)
        if world.rank == 0:
            full_state["state"] = dict(sorted(states.items()))
        return full_state  # type: ignore[no-any-return]

    def _received(self, value: Any, rank: int) -> Any:
        """Return a state value of another rank; a tensor's values are received from it."""
        import torch.distributed as dist

        if not isinstance(value, torch.Tensor):
            return value
        received = self._sent(torch.empty(value.shape, dtype=value.dtype))
        dist.recv(received, rank)
        return received.cpu()

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on a device that the ranks can send it from: the CPU, or with NCCL alone the GPU."""
        return tensor.detach().cpu().to(self._world._wire(torch.empty(0))).contiguous()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's part of a whole optimizer state."""
        own = {at: value for at, value in state["state"].items() if self.owner[at] == self._world.rank}
        self._optimizer.load_state_dict({**state, "state": own})


def _without_memory(state: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with its tensors on "meta": it announces which tensors are sent afterwards."""
    return {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in state.items()}
