"""Convert a whole model to another floating-point dtype, and keep tensors that share memory sharing it.

`module.to(dtype)` would give each tensor memory of its own, and so untie weights that are views of one buffer or tied
by `.data`. `convert` converts each shared storage once and rebuilds the views. `in_dtype` wraps the forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hasten.errors import HastenError
from hasten.techniques.base import Call
from hasten.techniques.nested import map_tensors


def convert(model: Any, dtype: Any) -> None:
    """Convert floating-point parameters and buffers to a dtype; parameters stay the same objects.

    Raises:
        HastenError: Other processes, or tensors outside of the model, share its memory: they would not be converted.
    """
    import torch

    names = {torch.bfloat16: "bfloat16", torch.float16: "half", torch.float64: "double"}
    changing = [
        (name, tensor)
        for name, tensor in _tensors_of(model)
        if tensor.is_floating_point() and tensor.dtype is not dtype
    ]
    if not changing:
        return
    tied = []
    for sharing in _by_storage(changing):
        _refuse_shared_outside(*sharing[0], len(sharing), dtype)
        if len(sharing) > 1:
            places = {name: (tensor.size(), tensor.stride(), tensor.storage_offset()) for name, tensor in sharing}
            tied.append((sharing[0][1].detach(), places))
    getattr(model, names[dtype])()
    converted = dict(_tensors_of(model))  # read again: the conversion replaces buffers by new objects
    for old, places in tied:
        whole = torch.empty(0, dtype=old.dtype, device=old.device).set_(old.untyped_storage()).to(dtype)
        for name, place in places.items():
            converted[name].data = whole.as_strided(*place)


def _tensors_of(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _by_storage(tensors: list[tuple[str, Any]]) -> list[list[tuple[str, Any]]]:
    """Group named tensors by storage and dtype. Leave out kinds of tensors without plain memory."""
    import torch
    from torch.nn.parameter import is_lazy

    plain = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    groups: dict[tuple[int, Any], list[tuple[str, Any]]] = {}
    for name, tensor in tensors:
        if type(tensor) in plain and not is_lazy(tensor) and tensor.layout is torch.strided and tensor.numel():
            groups.setdefault((tensor.untyped_storage()._cdata, tensor.dtype), []).append((name, tensor))
    return list(groups.values())


def _refuse_shared_outside(name: str, tensor: Any, count: int, dtype: Any) -> None:
    """Raise if more than `count` tensors, or other processes, use a tensor's storage."""
    import torch

    memory = tensor.untyped_storage()
    kind = str(dtype).removeprefix("torch.")
    if memory.device.type == "cpu" and memory.is_shared():
        raise HastenError(
            f"{name} lies in memory that processes share: those that hold it already would not see it in {kind}",
            f"Convert the module before its memory is shared: module.to(torch.{kind}).share_memory()",
        )
    if torch._C._storage_Use_Count(memory._cdata) - 1 > count:  # `memory` counts as a user too
        raise HastenError(
            f"{name} shares its memory with a tensor that is no parameter or buffer of the module, and would no longer "
            f"change with it once it is {kind}",
            f"Convert both before fit (module.to(torch.{kind}), then tie them), or make the other one a buffer; "
            "where it is a leftover of an earlier forward, `del` it.",
        )


def in_dtype(call: Call, dtype: Any) -> Call:
    """Wrap a forward: cast floating-point inputs to a dtype, and make it the default dtype of new tensors.

    In-place changes that the forward makes to an input are copied back to the caller's tensor.
    """
    import torch

    def converted(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        twins: dict[int, tuple[Any, Any, int]] = {}  # id of an input -> input, cast copy, the copy's version

        def cast(tensor: Any) -> Any:
            if not tensor.is_floating_point() or tensor.dtype is dtype:
                return tensor
            if id(tensor) not in twins:
                with torch.inference_mode(False):  # inference tensors have no version counter
                    twin = tensor.to(dtype)
                twins[id(tensor)] = tensor, twin, twin._version
            return twins[id(tensor)][1]

        args, kwargs = map_tensors(cast, (args, kwargs))
        try:
            with new_tensors_in(dtype):
                return call(module, args, kwargs)
        finally:
            for tensor, twin, version in twins.values():
                if twin._version != version:  # changed in place
                    with torch.no_grad():
                        tensor.copy_(twin)

    return converted


@contextlib.contextmanager
def new_tensors_in(dtype: Any) -> Iterator[None]:
    """Make a dtype the default dtype of new tensors within the context."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
