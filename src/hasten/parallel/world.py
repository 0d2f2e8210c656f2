"""World: this process's place among the ranks of a training, and the collectives between them.

`World.from_environment` joins the ranks that a launcher started: it meets them in a store, then opens the process
group. At exit all ranks meet once more before any closes its connections, and the rank that may serve the store leaves
last; without that, ranks would abort each other after a successful training.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from hasten import messages
from hasten.errors import HastenError
from hasten.parallel.place import RankPlace, find_place
from hasten.parallel.rendezvous import open_store

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_PARTING_SECONDS = 60.0  # that a rank waits for the others at the end
_current: World | None = None
_joined = 0  # number of times that this process has joined other ranks
_failed = False  # whether this process ends because of an error


@dataclass(frozen=True)
class World:
    """This process's place among the ranks of a training.

    If `size` is 1, every method returns its argument and does not use torch.distributed. Otherwise each method is a
    collective: all ranks must call it, in the same order. Tensors may be on the CPU or on `device`; results are on the
    argument's device. Nothing is changed in place.
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    num_nodes: int = 1
    node_rank: int = 0
    local_size: int = 1
    backend: str = ""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    launcher: str = ""
    _store: Store | None = field(default=None, repr=False, compare=False)
    _cpu_wire: bool = field(default=True, repr=False, compare=False)

    @classmethod
    def from_environment(
        cls,
        backend: str | None = None,
        device: torch.device | None = None,
        timeout: timedelta | float | None = None,
        join_timeout: float = 1800.0,
    ) -> World:
        """Join the other processes that a launcher (hasten, torchrun, srun) started. Return a world of one if none did.

        A second call returns the open world. A process group that other code has opened is used as it is, and not
        closed here.

        Args:
            backend: "gloo" or "nccl"; None: "nccl" for a GPU, else "gloo". With "nccl", CPU tensors are sent by gloo.
            device: This rank's device; None: GPU number `local_rank` with nccl, else the CPU.
            timeout: Seconds that a collective waits for the other ranks; None: torch's default, 30 minutes for gloo and
                10 for nccl.
            join_timeout: Seconds to wait for the other ranks to join.

        Raises:
            HastenError: Other ranks did not join in time; names them.
        """
        place = find_place()
        if place is None or place.size == 1:
            return cls(device=device or torch.device("cpu"), launcher=place.launcher if place else "")
        if _current is not None:
            return _current
        if device is None:
            device = torch.device("cuda", place.local_rank) if backend == "nccl" else torch.device("cpu")
        return _join(place, backend or ("nccl" if device.type == "cuda" else "gloo"), device, timeout, join_timeout)

    @property
    def is_zero(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.rank == 0

    @property
    def store(self) -> Store | None:
        """Store for values that ranks exchange without a collective; None if there is only one rank."""
        if self._store is not None or self.size == 1:
            return self._store
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.distributed_c10d import _get_default_store

        return PrefixStore("hasten", _get_default_store())  # the store of other code that opened the group

    def in_groups(self, size: int) -> World:
        """Return a world whose `rank` and `size` count groups of `size` neighboring ranks, to split samples by.

        Use only its numbers: its methods would still be collectives of all ranks.
        """
        return self if size == 1 else replace(self, rank=self.rank // size, size=self.size // size)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Return rank `src`'s picklable object on all ranks."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=src, device=None if self._cpu_wire else self.device)
        return box[0]

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank. Waits for the other ranks, not for the GPU."""
        return bool(flag) if self.size == 1 else bool(self.reduce(torch.tensor(int(flag)), "max"))

    def all(self, flag: bool) -> bool:
        """Return whether the flag is set on all ranks. Waits for the other ranks, not for the GPU."""
        return bool(flag) if self.size == 1 else bool(self.reduce(torch.tensor(int(flag)), "min"))

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elementwise mean over the ranks; float32 for integer tensors."""
        return self.reduce(tensor, "mean")

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elementwise sum over the ranks."""
        return self.reduce(tensor, "sum")

    def reduce(self, tensor: torch.Tensor, op: str = "mean") -> torch.Tensor:
        """Return the elementwise reduction of all ranks' tensors, which have the same shape; without gradients.

        Args:
            tensor: This rank's tensor.
            op: "mean" (or "avg"), "sum", "max", "min" or "product".

        Raises:
            HastenError: `op` is unknown.
        """
        if op not in {"mean", "avg", "sum", "max", "min", "product"}:
            raise HastenError(f"Ranks cannot be reduced by {op!r}.", "Use mean, sum, max, min or product.")
        if self.size == 1:
            return tensor
        import torch.distributed as dist

        ops = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}
        is_mean = op in {"mean", "avg"}
        # Collectives do not sum bool tensors, so send them as uint8. gloo has no mean, so sum and divide.
        dtype = torch.uint8 if tensor.dtype is torch.bool else None
        if is_mean and not (tensor.is_floating_point() or tensor.is_complex()):
            dtype = torch.int64  # exact: float32 would round each rank's number above 2**24, and int8 sums overflow
        sent = tensor.detach().to(self._wire(tensor), dtype, copy=True).contiguous()
        dist.all_reduce(sent, ops.get(op, dist.ReduceOp.SUM))
        if is_mean and sent.dtype is torch.int64:
            sent = (sent.double() / self.size).float()
        elif is_mean:
            sent /= self.size
        elif tensor.dtype is torch.bool:
            sent = sent.bool()
        return sent.to(tensor.device)

    def gather(self, tensor: torch.Tensor, sync_grads: bool = False) -> torch.Tensor:
        """Return all ranks' tensors, stacked.

        Args:
            tensor: Shape (...), the same on every rank.
            sync_grads: Whether gradients flow back through the result, summed over the ranks, to each rank's tensor.

        Returns:
            Shape (size, ...), by rank; (1, ...) if there is only one rank.
        """
        if self.size == 1:
            return tensor.unsqueeze(0)
        import torch.distributed as dist

        sent = tensor.to(self._wire(tensor)).contiguous()
        if sync_grads and torch.is_grad_enabled():
            from torch.distributed.nn.functional import all_gather

            return torch.stack(all_gather(sent)).to(tensor.device)
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(parts, sent.detach())
        return torch.stack(parts).to(tensor.device)

    def barrier(self, name: str = "") -> None:
        """Wait until every rank calls this. `name` is unused: it documents the call."""
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier(device_ids=[self.device.index or 0] if self.device.type == "cuda" else None)

    def close(self, failed: bool = False) -> None:
        """Leave the process group; called automatically when the process exits.

        All ranks meet before any closes its connections: without that, about one gloo job in seven is aborted (exit
        code 134) after its work is done.

        Args:
            failed: Whether this rank ends because of an error. Then it does not wait for the others.
        """
        global _current
        if self.size == 1 or self._store is None or _current is not self:
            return
        _current = None
        import torch.distributed as dist

        if not dist.is_initialized():
            return
        if failed:
            if self.backend == "gloo":  # destroying an nccl group may wait for ranks that are gone
                dist.destroy_process_group()
            return
        if not self._all_reached("parting"):
            messages.warn(f"rank {self.rank}: not all ranks came to the end of the training", stacklevel=2)
        else:
            self.barrier("parting")
            dist.destroy_process_group()
        self._leave()

    def _leave(self) -> None:
        """Leave the store. Rank 0 may serve it, so it leaves last."""
        assert self._store is not None
        if self.launcher == "hasten":  # the main process serves the store, and ends after all ranks
            return
        if self.rank == 0:
            self._all_reached("gone")
        else:
            self._store.add("gone", 1)

    def _all_reached(self, point: str) -> bool:
        """Meet the other ranks through the store. Return False if they do not all come in time.

        Unlike a collective, waiting through the store can have a time limit.
        """
        assert self._store is not None
        end = time.monotonic() + _PARTING_SECONDS
        arrived = self._store.add(point, 1)
        while arrived < self.size and time.monotonic() < end:
            time.sleep(0.01)
            arrived = self._store.add(point, 0)
        return arrived >= self.size

    def _wire(self, tensor: torch.Tensor) -> torch.device:
        """Return the device that a tensor must be on to be sent."""
        return tensor.device if self._cpu_wire or tensor.device.type != "cpu" else self.device


def mark_failed() -> None:
    """Note that this process ends because of an error, so that it does not wait for the others when it exits."""
    global _failed
    _failed = True


def has_failed() -> bool:
    """Return whether this process ends because of an error."""
    # `sys.last_value` is set by Python when an uncaught exception ends the program.
    return _failed or getattr(sys, "last_value", None) is not None


def close_current() -> None:
    """Leave the world that this process has joined, if any."""
    if _current is not None:
        _current.close()


def has_joined() -> bool:
    """Return whether this process has ever joined other ranks."""
    return _joined > 0


def _join(
    place: RankPlace, backend: str, device: torch.device, timeout: timedelta | float | None, join_timeout: float
) -> World:
    """Meet the other ranks and open the process group, unless other code has opened one. Return the world."""
    import torch.distributed as dist

    global _current, _joined
    if not dist.is_available():
        raise HastenError(
            f"This torch ({torch.__version__}) is built without torch.distributed: it trains in one process only.",
            "Install a torch with it (those on PyPI have it), or use devices=1.",
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    foreign = dist.is_initialized()
    store = None
    if not foreign:
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout) if timeout else None
        _joined += 1
        store = open_store(place, timedelta(seconds=join_timeout))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=limit,
            device_id=device if device.type == "cuda" else None,
        )
    world = World(
        rank=place.rank,
        local_rank=place.local_rank,
        size=place.size,
        num_nodes=place.num_nodes,
        node_rank=place.node_rank,
        local_size=place.local_size,
        backend=backend,
        device=device,
        launcher=place.launcher,
        _store=store,
        _cpu_wire="gloo" in str(dist.get_backend_config()),
    )
    _current = world
    if not foreign:
        atexit.register(_close_at_exit, world, os.getpid())
    return world


def _close_at_exit(world: World, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked DataLoader worker
        world.close(failed=has_failed())
