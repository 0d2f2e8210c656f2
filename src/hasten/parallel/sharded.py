"""Tensors of which each rank holds a part (torch's DTensor): this rank's part, and the way to the whole and back.

Nothing here imports DTensor unless there is one: a tensor that is whole passes through untouched.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, of which this rank may hold only a part."""
    return hasattr(tensor, "full_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, in the same memory and without its graph; may have no elements."""
    part: Any = tensor.detach()
    return part.to_local() if is_sharded(part) else part  # type: ignore[no-any-return]


def whole(tensor: torch.Tensor, keep: bool) -> torch.Tensor:
    """Gather a tensor from all ranks; a collective where it is sharded.

    Args:
        tensor: On each rank the same one.
        keep: Whether this rank wants the numbers; elsewhere a tensor of that shape without memory is returned.

    Returns:
        A plain tensor without a graph: the whole one on the CPU, or one on "meta".
    """
    part: Any = tensor.detach()
    if not is_sharded(part):
        return part  # type: ignore[no-any-return]
    full: torch.Tensor = part.full_tensor()
    return full.cpu() if keep else torch.empty_like(full, device="meta")


def share_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Lay a whole tensor out as a sharded one is; no collective: each rank has the whole.

    Args:
        tensor: The whole, of the shape of `like`; one that is sharded already is returned.
        like: Whose layout, device and ranks are taken; where it is not sharded, `tensor` is returned.
    """
    if not is_sharded(like) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    moved = tensor.detach().to(like.device)
    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(moved, mesh, placements, src_data_rank=None)


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return tensors in lists of one mesh each, whole ones in one of their own.

    torch's functions of several tensors refuse those that lie on several meshes.
    """
    kinds: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if is_sharded(tensor) else None  # type: ignore[attr-defined]
        kinds.setdefault(mesh, []).append(tensor)
    return list(kinds.values())
