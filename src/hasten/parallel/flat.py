"""Group tensors by dtype and device, to send each group as one flat tensor, and copy it back into them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


def by_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return tensors grouped by dtype and device, the groups in order of their first tensors."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


def pieces(tensors: Iterable[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    """Yield groups of tensors of one dtype and device, each as short as possible with at least `size` bytes in total.

    The last group of a dtype and device may be smaller.
    """
    for same_kind in by_kind(tensors):
        piece: list[torch.Tensor] = []
        size_so_far = 0
        for tensor in same_kind:
            piece.append(tensor)
            size_so_far += tensor.nbytes
            if size_so_far >= size:
                yield piece
                piece, size_so_far = [], 0
        if piece:
            yield piece


def copy_back(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copy the parts of a flat tensor into the tensors it was concatenated from."""
    for tensor, part in zip(tensors, flat.split([one.numel() for one in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
