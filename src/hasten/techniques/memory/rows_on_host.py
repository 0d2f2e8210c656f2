"""Forwards of embeddings whose table is on the host: gather a batch's rows there, and copy them to the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LOOK_UPS: tuple[type[nn.Module], ...] = (nn.Embedding, nn.EmbeddingBag)


def table_of(module: Any, least: int) -> Tensor | None:
    """Return the weight of a module if it may stay on the host; None if it is small, or no table of torch's embeddings.

    Args:
        module: Any module.
        least: Smallest size in bytes of a table that may stay.
    """
    kind = next((kind for kind in LOOK_UPS if isinstance(module, kind)), None)
    weight = None if kind is None else module._parameters.get("weight")  # None if it is computed (parametrize)
    if kind is None or type(weight) is not nn.Parameter or weight.layout is not torch.strided:
        return None
    own = type(module).forward is not kind.forward or "forward" in vars(module)  # may do anything with the weight
    unsupported = module.scale_grad_by_freq and module.sparse  # torch refuses this combination in the backward
    return None if own or unsupported or weight.nbytes < least else weight


def several_processes() -> bool:
    """Return whether other processes train with this one. Without a process group, torchrun's WORLD_SIZE tells."""
    distributed = torch.distributed
    initialized = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() > 1 if initialized else os.environ.get("WORLD_SIZE", "1") not in ("", "1")


def staying(fn: Callable[[Tensor], Tensor], weight: Tensor, device: str) -> Callable[[Tensor], Tensor]:
    """Return a replacement for the `fn` of `Module._apply` that leaves the table on the host, but converts its dtype.

    Args:
        fn: Converts each tensor; made by `module.to(...)`.
        weight: The table.
        device: Type of the device that the table is kept away from. An `fn` that moves to another device is returned
            unchanged.
    """
    moved = fn(torch.empty(0, dtype=weight.dtype, device="cpu"))  # an empty probe, to learn fn's device and dtype
    if weight.device.type != "cpu" or moved.device.type != device:
        return fn
    gradient = weight.grad

    def converted(tensor: Tensor) -> Tensor:
        return tensor.to(moved.dtype) if tensor is weight or tensor is gradient else fn(tensor)

    return converted


def looks_up(plain: Any, device: str) -> Any:
    """Return a forward for `nn.Embedding` and `nn.EmbeddingBag` that also looks up rows in a table on the host.

    Args:
        plain: torch's own, called if table and indices are on the same device.
        device: Type of the device on which the indices of host tables are.
    """

    def forward(module: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if module.weight.device.type == "cpu" and input.device.type == device:
            return _from_host(module, input, *args, **kwargs)
        return plain(module, input, *args, **kwargs)

    return forward


# The number of distinct rows depends on the batch's values, which a compiled graph cannot know.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _from_host(
    module: Any, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
) -> Tensor:
    """Look up a batch whose indices are on the device: (*) -> (*, columns), or bags -> (bags, columns)."""
    unique, places = torch.unique(input, return_inverse=True)
    on_host = unique.cpu()
    rows = F.embedding(  # the table's gradient is made here, on the host: as large as the table, or sparse
        on_host, module.weight, module.padding_idx, module.max_norm, module.norm_type, False, module.sparse
    ).to(input.device)
    if isinstance(module, nn.Embedding):
        return F.embedding(places, rows, scale_grad_by_freq=module.scale_grad_by_freq)
    padding = None if module.padding_idx is None else (on_host == module.padding_idx).nonzero().flatten().tolist()
    return F.embedding_bag(
        places.to(input.dtype),  # the offsets' dtype, as embedding_bag requires
        rows,
        offsets,
        scale_grad_by_freq=module.scale_grad_by_freq,
        mode=module.mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=module.include_last_offset,
        padding_idx=padding[0] if padding else None,
    )
