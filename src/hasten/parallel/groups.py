"""Groups of neighboring ranks that work on one batch: their mesh, what must be equal in them, averages over them."""

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
    """Return the ranks in groups of `size` neighbors: dimension "group" within one, "data" across them.

    Args:
        world: The ranks.
        size: Ranks of a group.
        option: What says so, for the message.

    Raises:
        HastenError: The ranks do not come out even.
    """
    from torch.distributed.device_mesh import init_device_mesh

    if world.size % size:
        raise HastenError(
            f"{option}={size}: {world.size} processes do not come out even.",
            "Use a divisor of their number, at most the number of devices on a machine.",
        )
    return init_device_mesh(world.device.type, (world.size // size, size), mesh_dim_names=("data", "group"))


def average_all(parameters: Iterable[torch.Tensor], shares: World, group: Any) -> None:
    """Average the gradients of parameters over the groups of ranks, in place; a collective.

    Args:
        parameters: In the same order on all ranks of `group`; some may have no gradient on some of them.
        shares: From `World.in_groups`.
        group: The ranks that hold the same parameters.
    """
    import torch.distributed as dist

    given = list(parameters)
    missing = [at for at, one in enumerate(given) if one.grad is None]
    have = torch.tensor([int(one.grad is not None) for one in given], device=shares.device)
    dist.all_reduce(have, dist.ReduceOp.MAX, group=group)
    for at in missing:
        given[at].grad = torch.zeros_like(given[at])
    average([local(one.grad) for one in given if one.grad is not None], shares, group)
    somewhere = have.tolist() if missing else []  # only then the device is waited for
    for at in missing:
        if not somewhere[at]:
            given[at].grad = None  # zeros would be stepped: by momentum, and by weight decay


class SameBatch:
    """Compares the batches of a group, in steps 1, 2, 4, 8, ... of a training.

    Args:
        group: The ranks that work on one batch.
        world: All of them.
    """

    def __init__(self, group: Any, world: World) -> None:
        self._group, self._world, self._size = group, world, group.size()
        self._steps = Doubling()

    def due(self) -> bool:
        """Count a step, and return whether it is one that is looked at."""
        return next(self._steps)

    def batch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raise where the ranks of the group have other batches.

        Raises:
            HastenError: On all ranks of the group.
        """
        found = 0
        for tensor in tensors:
            if tensor.layout is torch.strided:
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                found = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), found)
        if len(set(self.gathered([float(found)])[:, 0].tolist())) > 1:
            raise HastenError(
                f"The {self._size} processes that share one model have other batches, so what they compute together is"
                " of no batch at all.",
                "Seed them alike (hasten.seed_everything), and let a sampler or an IterableDataset share samples out"
                f" among groups of {self._size} processes: its rank is global_rank // {self._size}.",
            )

    def gathered(self, values: list[float]) -> torch.Tensor:
        """Return the values of all ranks of the group: (ranks, values)."""
        import torch.distributed as dist

        sent = torch.tensor(values, dtype=torch.float64).to(self._world.device)
        parts = [torch.empty_like(sent) for _ in range(self._size)]
        dist.all_gather(parts, sent, group=self._group)
        return torch.stack(parts).cpu()


class Doubling(Iterator[bool]):
    """True at its 1st, 2nd, 4th, 8th, ... value."""

    def __init__(self) -> None:
        self._count, self._due = 0, 1

    def __next__(self) -> bool:
        self._count += 1
        if self._count != self._due:
            return False
        self._due *= 2
        return True
