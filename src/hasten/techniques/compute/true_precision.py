"""A model converted to another floating-point type, with all that shares memory in it still sharing it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hasten.errors import HastenError
from hasten.techniques.base import Call
from hasten.techniques.nested import map_tensors


def convert(model: Any, dtype: Any) -> None:
    """Make floating-point parameters and buffers of that type, in place: they stay the same objects.

    Raises:
        HastenError: Other processes, or tensors outside of the model, share memory with it: they would not follow.
    """
    import torch

    names = {torch.bfloat16: "bfloat16", torch.float16: "half", torch.float64: "double"}
    changing = [(name, one) for name, one in _tensors_of(model) if one.is_floating_point() and one.dtype is not dtype]
    if not changing:
        return
    tied = []
    for of_one in _memories(changing):
        _refuse_what_is_shared(*of_one[0], len(of_one), dtype)
        if len(of_one) > 1:
            places = {name: (one.size(), one.stride(), one.storage_offset()) for name, one in of_one}
            tied.append((of_one[0][1].detach(), places))
    getattr(model, names[dtype])()
    converted = dict(_tensors_of(model))  # buffers are other objects now
    for old, places in tied:
        whole = torch.empty(0, dtype=old.dtype, device=old.device).set_(old.untyped_storage()).to(dtype)
        for name, place in places.items():
            converted[name].data = whole.as_strided(*place)


def _tensors_of(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _memories(tensors: list[tuple[str, Any]]) -> list[list[tuple[str, Any]]]:
    """Tensors of one type that lie in the same memory, with their names."""
    import torch
    from torch.nn.parameter import is_lazy

    plain = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    memories: dict[tuple[int, Any], list[tuple[str, Any]]] = {}
    for name, tensor in tensors:
        if type(tensor) in plain and not is_lazy(tensor) and tensor.layout is torch.strided and tensor.numel():
            memories.setdefault((tensor.untyped_storage()._cdata, tensor.dtype), []).append((name, tensor))
    return list(memories.values())


def _refuse_what_is_shared(name: str, tensor: Any, count: int, dtype: Any) -> None:
    """Raise where more than `count` tensors, or other processes, use the memory of one."""
    import torch

    memory = tensor.untyped_storage()
    kind = str(dtype).removeprefix("torch.")
    if memory.device.type == "cpu" and memory.is_shared():
        raise HastenError(
            f"{name} lies in memory that processes share: those that hold it already would not see it in {kind}",
            f"Convert the module before its memory is shared: module.to(torch.{kind}).share_memory()",
        )
    if torch._C._storage_Use_Count(memory._cdata) - 1 > count:  # `memory` itself is one
        raise HastenError(
            f"{name} shares its memory with a tensor that is no parameter or buffer of the module, and would no longer "
            f"change with it once it is {kind}",
            f"Convert both before fit (module.to(torch.{kind}), then tie them), or make the other one a buffer; "
            "where it is a leftover of an earlier forward, `del` it.",
        )


def in_dtype(call: Call, dtype: Any) -> Call:
    """A forward with floating-point inputs cast and new tensors of that type; what it does to an input is seen."""
    import torch

    def converted(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        twins: dict[int, tuple[Any, Any, int]] = {}

        def cast(tensor: Any) -> Any:
            if not tensor.is_floating_point() or tensor.dtype is dtype:
                return tensor
            if id(tensor) not in twins:
                with torch.inference_mode(False):  # an inference tensor does not count its changes
                    twin = tensor.to(dtype)
                twins[id(tensor)] = tensor, twin, twin._version
            return twins[id(tensor)][1]

        args, kwargs = map_tensors(cast, (args, kwargs))
        try:
            with new_tensors_in(dtype):
                return call(module, args, kwargs)
        finally:
            for tensor, twin, version in twins.values():
                if twin._version != version:  # changed in place: who made the batch sees that as well
                    with torch.no_grad():
                        tensor.copy_(twin)

    return converted


@contextlib.contextmanager
def new_tensors_in(dtype: Any) -> Iterator[None]:
    """Within it, tensors made without a type are of that type."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
