"""Forwards of embeddings whose table is on the host: the rows of a batch are gathered there and go to the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LOOK_UPS: tuple[type[nn.Module], ...] = (nn.Embedding, nn.EmbeddingBag)


def table_of(module: Any, least: int) -> Tensor | None:
    """Return the weight of a module that may stay on the host; None: it is none of torch's embeddings, or small.

    Args:
        module: Any module.
        least: Size of a table in bytes, from which on it counts.
    """
    kind = next((kind for kind in LOOK_UPS if isinstance(module, kind)), None)
    weight = None if kind is None else module._parameters.get("weight")  # none where it is computed (parametrize)
    if kind is None or type(weight) is not nn.Parameter or weight.layout is not torch.strided:
        return None
    own = type(module).forward is not kind.forward or "forward" in vars(module)  # nobody knows what that does with it
    odd = module.scale_grad_by_freq and module.sparse  # torch refuses it in the backward
    return None if own or odd or weight.nbytes < least else weight


def several_processes() -> bool:
    """Whether other processes train with this one; torchrun says so before they have met."""
    distributed = torch.distributed
    met = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() > 1 if met else os.environ.get("WORLD_SIZE", "1") not in ("", "1")


def staying(fn: Callable[[Tensor], Tensor], weight: Tensor, device: str) -> Callable[[Tensor], Tensor]:
    """Return what a module's `_apply` is to do in place of `fn`: keep the table where it is, but not its type.

    Args:
        fn: What converts each tensor: that of `module.to(...)`.
        weight: The table.
        device: Type of the device that it is kept from; where `fn` brings it elsewhere, that is done.
    """
    moved = fn(torch.empty(0, dtype=weight.dtype, device="cpu"))  # of no size: it says where to, and to which type
    if weight.device.type != "cpu" or moved.device.type != device:
        return fn
    gradient = weight.grad

    def converted(tensor: Tensor) -> Tensor:
        return tensor.to(moved.dtype) if tensor is weight or tensor is gradient else fn(tensor)

    return converted


def looks_up(plain: Any, device: str) -> Any:
    """Return the forward of `nn.Embedding` and `nn.EmbeddingBag` that finds a table on the host.

    Args:
        plain: torch's own, called where table and indices are together.
        device: Type of the device whose indices look up rows on the host.
    """

    def forward(module: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if module.weight.device.type == "cpu" and input.device.type == device:
            return _from_host(module, input, *args, **kwargs)
        return plain(module, input, *args, **kwargs)

    return forward


# Which rows a batch needs is not known before it is there.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _from_host(
    module: Any, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
) -> Tensor:
    """Look up a batch: (*) -> (*, columns), or bags -> (bags, columns)."""
    unique, places = torch.unique(input, return_inverse=True)
    on_host = unique.cpu()
    rows = F.embedding(  # its gradient is the table's, on the host: as large as that, or sparse
        on_host, module.weight, module.padding_idx, module.max_norm, module.norm_type, False, module.sparse
    ).to(input.device)
    if isinstance(module, nn.Embedding):
        return F.embedding(places, rows, scale_grad_by_freq=module.scale_grad_by_freq)
    padding = None if module.padding_idx is None else (on_host == module.padding_idx).nonzero().flatten().tolist()
    return F.embedding_bag(
        places.to(input.dtype),  # that of the offsets
        rows,
        offsets,
        scale_grad_by_freq=module.scale_grad_by_freq,
        mode=module.mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=module.include_last_offset,
        padding_idx=padding[0] if padding else None,
    )
