"""Convert between sharded tensors (torch's DTensor), this rank's part of them, and whole tensors.

Nothing here imports DTensor unless a tensor is one: unsharded tensors pass through unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, of which this rank may hold a part only."""
    return hasattr(tensor, "full_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, sharing its storage, detached; it may have no elements."""
    part: Any = tensor.detach()
    return part.to_local() if is_sharded(part) else part  # type: ignore[no-any-return]


def gather_full(tensor: torch.Tensor, keep: bool) -> torch.Tensor:
    """Return a whole tensor, gathered from all ranks; a collective if it is sharded.

    Args:
        tensor: The same tensor on each rank.
        keep: Whether this rank needs the values.

    Returns:
        A plain, detached tensor: if sharded, on the CPU where `keep` is true, otherwise on "meta".
    """
    part: Any = tensor.detach()
    if not is_sharded(part):
        return part  # type: ignore[no-any-return]
    full: torch.Tensor = part.full_tensor()
    return full.cpu() if keep else torch.empty_like(full, device="meta")


def share_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor sharded as another one is. No collective: each rank has the whole tensor.

    Args:
        tensor: Whole tensor, of the shape of `like`; returned unchanged if it is sharded already.
        like: Tensor whose mesh, placements and device are used; if it is not sharded, `tensor` is returned.
    """
    if not is_sharded(like) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    moved = tensor.detach().to(like.device)
    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(moved, mesh, placements, src_data_rank=None)


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return tensors grouped by device mesh, unsharded ones in one group.

    torch's multi-tensor functions refuse tensors of different meshes.
    """
    kinds: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if is_sharded(tensor) else None  # type: ignore[attr-defined]
        kinds.setdefault(mesh, []).append(tensor)
    return list(kinds.values())
