"""Compress the gradients that DDP exchanges: to 16 bits, or to products of thin matrices (PowerSGD).

Both are communication hooks, and work over gloo and NCCL.
"""

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
    """Make DDP exchange compressed gradients from its next backward on.

    Args:
        ddp: A model without a communication hook.
        kind: "bf16": half the bytes, 8 significant bits; "fp16": half the bytes, 11 significant bits, but gradients
            beyond 65504 become infinite; "powersgd": rank * (rows + columns) numbers per matrix.
        world: More than one rank.
        rank: Columns of PowerSGD's matrices.
        start: Number of first averaged backwards, mostly one per step, that PowerSGD leaves uncompressed.

    Returns:
        PowerSGD's state, to be kept in checkpoints; None for the other kinds.
    """
    # Lambdas: torch compares a hook's annotations with its classes, and here, under `from __future__ import
    # annotations`, they are strings. A lambda has none.
    if kind == "powersgd":
        power = PowerSGD(ddp.module, world, rank, start)
        ddp.register_comm_hook(power, lambda state, bucket: _powersgd(state, bucket))  # noqa: PLW0108
        return power
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    ddp.register_comm_hook(world, lambda state, bucket: _in_16_bits(state, dtype, bucket))
    return None


def _in_16_bits(world: World, dtype: torch.dtype, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in 16 bits while the backward continues; the average is written back in the gradients' dtype."""
    import torch.distributed as dist

    gradients = bucket.buffer()
    sent = (gradients / world.size).to(dtype)  # divide first, so that the sum over ranks does not overflow
    future = dist.all_reduce(sent, async_op=True).get_future()

    def back(future: Any) -> torch.Tensor:
        gradients.copy_(future.value()[0])
        return gradients

    return future.then(back)  # type: ignore[no-any-return]


def _powersgd(state: PowerSGD, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket by PowerSGD. The future is complete when this returns: the collectives run synchronously."""
    gradients = bucket.buffer()
    done: Any = torch.futures.Future(devices=[gradients.device] if gradients.is_cuda else None)
    state.average(bucket)
    done.set_result(gradients)
    return done  # type: ignore[no-any-return]


class PowerSGD:
    """Average gradients as products of two thin matrices; the error is added to the next step's gradient.

    Vogels et al. 2019, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization. A gradient M
    (n x m) is sent as P (n x rank) and Q (m x rank). Vectors, and matrices that would not get smaller, are sent whole.

    The errors and each Q are stored per parameter, so a training can resume from a checkpoint however DDP cuts its
    buckets then. Only the mean of the ranks' errors affects the result, so a checkpoint stores only that. (torch's own
    hook stores both per bucket, and waits for a collective inside another one's callback, where all of gloo's threads
    may be waiting.)

    Args:
        module: The model, the same on all ranks.
        world: More than one rank.
        rank: Columns of P and Q: more columns lose less and cost more.
        start: Number of first averaged backwards left uncompressed: gradients change fast in them.
    """

    def __init__(self, module: torch.nn.Module, world: World, rank: int, start: int) -> None:
        self.world, self.rank, self.start = world, rank, start
        self.steps = 0  # averaged backwards: with two optimizers, two per step
        self._names = {id(p): name.removeprefix("module.") for name, p in module.named_parameters()}
        self._errors: dict[str, torch.Tensor] = {}
        self._queries: dict[str, torch.Tensor] = {}
        self.sent = self.unreduced = 0  # elements in the last step: sent by this rank, and in the gradients

    def average(self, bucket: GradBucket) -> None:
        """Replace a bucket's gradients by their mean over the ranks, exact or approximated."""
        if bucket.index() == 0:
            self.sent = self.unreduced = 0
        self.unreduced += bucket.buffer().numel()
        if self.steps < self.start:
            self._mean([bucket.buffer()])
        else:
            self._low_rank(bucket)
        if bucket.is_last():
            self.steps += 1

    def _low_rank(self, bucket: GradBucket) -> None:
        """Replace a bucket's gradients by their low-rank mean: one power iteration, in two all-reduces (P, then Q)."""
        plain, names, gradients = [], [], []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if self._gets_smaller(gradient):
                names.append(self._names[id(parameter)])
                gradients.append(gradient)
            else:
                plain.append(gradient)
        matrices = [self._with_error(name, gradient) for name, gradient in zip(names, gradients, strict=True)]
        queries = [self._query(name, matrix) for name, matrix in zip(names, matrices, strict=True)]
        bases = [matrix @ query for matrix, query in zip(matrices, queries, strict=True)]
        self._mean([*plain, *bases])
        bases = [torch.linalg.qr(product).Q for product in bases]
        queries = [matrix.T @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        self._mean(queries)
        for name, gradient, matrix, basis, query in zip(names, gradients, matrices, bases, queries, strict=True):
            approximation = basis @ query.T
            # The loop or a scaler may skip a step that is not finite. Its NaN must not stay in the state, or every
            # later step would be NaN, too.
            self._errors[name] = torch.nan_to_num(matrix - approximation, 0.0, 0.0, 0.0)
            self._queries[name] = torch.nan_to_num(query, 0.0, 0.0, 0.0)
            gradient.copy_(approximation.view(gradient.shape))

    def _gets_smaller(self, gradient: torch.Tensor) -> bool:
        """Return whether P and Q have fewer elements than the gradient."""
        if gradient.dim() < 2:
            return False
        rows = gradient.shape[0]
        return self.rank * (rows + gradient.numel() // rows) < gradient.numel()

    def _with_error(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient as a float32 matrix, with the error of the step before added."""
        matrix = gradient.reshape(gradient.shape[0], -1).float()
        error = self._errors.get(name)
        return matrix if error is None else matrix + error.to(matrix.device)

    def _query(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Return the last step's Q, orthogonalized, as a warm start; at first a random one, the same on all ranks."""
        query = self._queries.get(name)
        if query is None:
            generator = torch.Generator().manual_seed(matrix.numel())  # leaves the global RNG state alone
            query = torch.randn(matrix.shape[1], self.rank, generator=generator).to(matrix.device)
        orthogonal: torch.Tensor = torch.linalg.qr(query.to(matrix.device)).Q
        return orthogonal

    def _mean(self, tensors: list[torch.Tensor]) -> None:
        """Average tensors over the ranks in place, in one all-reduce per dtype and device."""
        import torch.distributed as dist

        for same_kind in by_kind(tensors):
            flat = same_kind[0].reshape(-1) if len(same_kind) == 1 else torch.cat([t.reshape(-1) for t in same_kind])
            flat = flat / self.world.size
            dist.all_reduce(flat)
            self.sent += flat.numel()
            copy_back(flat, same_kind)

    # -- checkpoints -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. A collective, since errors are averaged."""
        errors = {name: self.world.mean(error).cpu() for name, error in self._errors.items()}
        return {"steps": self.steps, "errors": errors, "queries": {n: q.cpu() for n, q in self._queries.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, on any number of ranks. Each Q with another number of columns is dropped."""
        self.steps = state["steps"]
        self._errors = dict(state["errors"])
        self._queries = {name: query for name, query in state["queries"].items() if query.shape[1] == self.rank}
