"""Groups of neighboring ranks that compute one batch together: their mesh, gradient averages, consistency checks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from hasten.errors import HastenError
from hasten.parallel.ddp import average
from hasten.parallel.sharded import local
from hasten.parallel.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def mesh_of(world: World, size: int, option: str) -> DeviceMesh:
    """Return a mesh of groups of `size` neighboring ranks: dimension "group" within a group, "data" across groups.

    Args:
        world: The ranks.
        size: Number of ranks in a group.
        option: Name of the option that sets the size, for the error message.

    Raises:
        HastenError: `size` does not divide the number of ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh

    if world.size % size:
        raise HastenError(
            f"{option}={size}: {world.size} processes do not come out even.",
            "Use a divisor of their number, at most the number of devices on a machine.",
        )
    return init_device_mesh(world.device.type, (world.size // size, size), mesh_dim_names=("data", "group"))


def average_all(parameters: Iterable[torch.Tensor], shares: World, group: Any) -> None:
    """Average gradients over the ranks that hold the same parameters, in place; a collective.

    Args:
        parameters: Parameters, in the same order on all ranks of `group`; a rank may lack some of the gradients.
        shares: World of the groups, from `World.in_groups`.
        group: Process group of the ranks that hold the same parameters.
    """
    import torch.distributed as dist

    listed = list(parameters)
    missing = [at for at, parameter in enumerate(listed) if parameter.grad is None]
    have = torch.tensor([int(parameter.grad is not None) for parameter in listed], device=shares.device)
    dist.all_reduce(have, dist.ReduceOp.MAX, group=group)
    for at in missing:
        listed[at].grad = torch.zeros_like(listed[at])
    average([local(parameter.grad) for parameter in listed if parameter.grad is not None], shares, group)
    somewhere = have.tolist() if missing else []  # reading it waits for the device: only if needed
    for at in missing:
        if not somewhere[at]:
            listed[at].grad = None  # with a gradient of zeros, momentum and weight decay would change it


class SameBatch:
    """Checks that the ranks of a group have the same batch, in steps 1, 2, 4, 8, ... of a training.

    Args:
        group: Process group of the ranks that compute one batch together.
        world: All ranks.
    """

    def __init__(self, group: Any, world: World) -> None:
        self._group, self._world, self._size = group, world, group.size()
        self._steps = Doubling()

    def is_due(self) -> bool:
        """Count a step. Return whether to check it."""
        return next(self._steps)

    def batch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Check that all ranks of the group have the same batch.

        Raises:
            HastenError: The batches differ; raised on all ranks of the group.
        """
        checksum = 0
        for tensor in tensors:
            if tensor.layout is torch.strided:
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                checksum = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), checksum)
        if len(set(self.gathered([float(checksum)])[:, 0].tolist())) > 1:
            raise HastenError(
                f"The {self._size} processes that share one model have other batches, so what they compute together is"
                " of no batch at all.",
                "Seed them alike (hasten.seed_everything), and let a sampler or an IterableDataset share samples out"
                f" among groups of {self._size} processes: its rank is global_rank // {self._size}.",
            )

    def gathered(self, values: list[float]) -> torch.Tensor:
        """Return the values of all ranks of the group, shape (ranks, values), on the CPU."""
        import torch.distributed as dist

        sent = torch.tensor(values, dtype=torch.float64).to(self._world.device)
        parts = [torch.empty_like(sent) for _ in range(self._size)]
        dist.all_gather(parts, sent, group=self._group)
        return torch.stack(parts).cpu()


class Doubling(Iterator[bool]):
    """Iterator that yields True at its 1st, 2nd, 4th, 8th, ... value, otherwise False."""

    def __init__(self) -> None:
        self._count, self._next = 0, 1

    def __next__(self) -> bool:
        self._count += 1
        if self._count != self._next:
            return False
        self._next *= 2
        return True
