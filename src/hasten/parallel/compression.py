"""DDP's gradients in fewer bytes: in 16 bits, or as products of thin matrices (PowerSGD). Work on gloo and on NCCL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hasten.parallel.flat import by_kind, copy_back
from hasten.parallel.world import World

if TYPE_CHECKING:
    from torch.distributed import GradBucket  # type: ignore[attr-defined]
    from torch.nn.parallel import DistributedDataParallel

KINDS = ("bf16", "fp16", "powersgd")


def compress(ddp: DistributedDataParallel, kind: str, world: World, rank: int = 2, start: int = 100) -> PowerSGD | None:
    """Let DDP exchange compressed gradients from its next backward on.

    Args:
        ddp: Without a communication hook yet.
        kind: "bf16": half the bytes, 8 bits of each gradient stay; "fp16": half the bytes, 11 bits, and gradients
            beyond 65504 become infinite; "powersgd": rank * (rows + columns) numbers for a matrix.
        world: Of more than one rank.
        rank: Of PowerSGD's matrices.
        start: Steps that PowerSGD leaves uncompressed first.

    Returns:
        What PowerSGD keeps from step to step; None for the others.
    """
    # Lambdas: torch compares a hook's annotations, which are texts in this file, with its classes.
    if kind == "powersgd":
        power = PowerSGD(ddp.module, world, rank, start)
        ddp.register_comm_hook(power, lambda state, bucket: _powersgd(state, bucket))  # noqa: PLW0108
        return power
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    ddp.register_comm_hook(world, lambda state, bucket: _in_16_bits(state, dtype, bucket))
    return None


def _in_16_bits(world: World, dtype: torch.dtype, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in 16 bits while the backward goes on; the average comes back in the gradients' own type."""
    import torch.distributed as dist

    gradients = bucket.buffer()
    sent = (gradients / world.size).to(dtype)  # divided first: a sum of ranks must not overflow
    future = dist.all_reduce(sent, async_op=True).get_future()

    def back(done: Any) -> torch.Tensor:
        gradients.copy_(done.value()[0])
        return gradients

    return future.then(back)  # type: ignore[no-any-return]


def _powersgd(state: PowerSGD, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradients = bucket.buffer()
    done: Any = torch.futures.Future(devices=[gradients.device] if gradients.is_cuda else None)
    state.average(bucket)
    done.set_result(gradients)
    return done  # type: ignore[no-any-return]


class PowerSGD:
    """Gradients of matrices as products of two thin ones; what is lost is added to the next step's gradient.

    Vogels et al. 2019, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization. A gradient M of
    n x m travels as P (n x rank) and Q (m x rank); vectors, and matrices that would not get smaller, travel whole.
    What is kept is kept by parameter, so a training goes on from a checkpoint however DDP cuts its buckets then; only
    the mean of the ranks' errors has an influence, so it is all that a checkpoint needs. (torch's own hook keeps both
    by bucket, and waits for a collective inside of another's callback, where gloo's threads may all be waiting.)

    Args:
        module: Whose gradients; two ranks have the same.
        world: Of more than one rank.
        rank: Columns of P and Q: more of them lose less, and cost more.
        start: Steps left uncompressed first, in which gradients change fast.
    """

    def __init__(self, module: torch.nn.Module, world: World, rank: int, start: int) -> None:
        self.world, self.rank, self.start = world, rank, start
        self.steps = 0
        self._names = {id(p): name.removeprefix("module.") for name, p in module.named_parameters()}
        self._errors: dict[str, torch.Tensor] = {}
        self._queries: dict[str, torch.Tensor] = {}
        self.sent = self.whole = 0  # numbers in the last step: sent by this rank, and those of the gradients

    def average(self, bucket: GradBucket) -> None:
        """Replace a bucket's gradients by their mean over the ranks, or by what is near it."""
        if bucket.index() == 0:
            self.sent = self.whole = 0
        self.whole += bucket.buffer().numel()
        if self.steps < self.start:
            self._mean([bucket.buffer()])
        else:
            self._low_rank(bucket)
        if bucket.is_last():
            self.steps += 1

    def _low_rank(self, bucket: GradBucket) -> None:
        plain, names, gradients = [], [], []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if self._gets_smaller(gradient):
                names.append(self._names[id(parameter)])
                gradients.append(gradient)
            else:
                plain.append(gradient)
        wide = [self._with_error(name, one) for name, one in zip(names, gradients, strict=True)]
        queries = [self._query(name, matrix) for name, matrix in zip(names, wide, strict=True)]
        left = [matrix @ query for matrix, query in zip(wide, queries, strict=True)]
        self._mean([*plain, *left])
        left = [torch.linalg.qr(one).Q for one in left]
        queries = [matrix.T @ one for matrix, one in zip(wide, left, strict=True)]
        self._mean(queries)
        for name, gradient, given, one, query in zip(names, gradients, wide, left, queries, strict=True):
            near = one @ query.T
            # A step that is not finite is somebody else's to drop; it must not stay in those behind it.
            self._errors[name] = torch.nan_to_num(given - near, 0.0, 0.0, 0.0)
            self._queries[name] = torch.nan_to_num(query, 0.0, 0.0, 0.0)
            gradient.copy_(near.view(gradient.shape))

    def _gets_smaller(self, gradient: torch.Tensor) -> bool:
        if gradient.dim() < 2:
            return False
        rows = gradient.shape[0]
        return self.rank * (rows + gradient.numel() // rows) < gradient.numel()

    def _with_error(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient as a matrix, in float32, with what was lost before."""
        matrix = gradient.reshape(gradient.shape[0], -1).float()
        error = self._errors.get(name)
        return matrix if error is None else matrix + error.to(matrix.device)

    def _query(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Return the last step's Q, a good guess; at first a random one, the same on all ranks."""
        query = self._queries.get(name)
        if query is None:
            generator = torch.Generator().manual_seed(matrix.numel())  # of its own: a model's draws stay as they are
            query = torch.randn(matrix.shape[1], self.rank, generator=generator).to(matrix.device)
        orthogonal: torch.Tensor = torch.linalg.qr(query.to(matrix.device)).Q
        return orthogonal

    def _mean(self, tensors: list[torch.Tensor]) -> None:
        """Average tensors over the ranks in place, in one message for each kind of number."""
        import torch.distributed as dist

        for alike in by_kind(tensors):
            flat = alike[0].reshape(-1) if len(alike) == 1 else torch.cat([one.reshape(-1) for one in alike])
            flat = flat / self.world.size
            dist.all_reduce(flat)
            self.sent += flat.numel()
            copy_back(flat, alike)

    # -- checkpoints -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a training goes on with; a collective: errors are averaged."""
        errors = {name: self.world.mean(error).cpu() for name, error in self._errors.items()}
        return {"steps": self.steps, "errors": errors, "queries": {n: q.cpu() for n, q in self._queries.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with it, on as many ranks as there are now; those of other parameters or another rank are dropped."""
        self.steps = state["steps"]
        self._errors = dict(state["errors"])
        self._queries = {name: query for name, query in state["queries"].items() if query.shape[1] == self.rank}
