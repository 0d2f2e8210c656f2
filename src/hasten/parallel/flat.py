"""Tensors of one kind in one piece, as they are sent: in lists of one type and device, and back from a flat tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


def by_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return tensors in lists of one type and device each, in the order of the first of each."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


def pieces(tensors: Iterable[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    """Give tensors of one type and device, so many that they have `size` bytes or are the last of their kind."""
    for alike in by_kind(tensors):
        piece: list[torch.Tensor] = []
        held = 0
        for tensor in alike:
            piece.append(tensor)
            held += tensor.nbytes
            if held >= size:
                yield piece
                piece, held = [], 0
        if piece:
            yield piece


def copy_back(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Write the parts of a flat tensor to the tensors that it was made of, in place."""
    for tensor, part in zip(tensors, flat.split([one.numel() for one in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
