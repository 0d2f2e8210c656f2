"""The tensors of a state as named entries: each memory is stored once, however many tensors share it.

`Entries` collects the tensors. Those that lie inside another tensor's memory (views, tied weights) are stored as
offset, shape and strides into it. `Restored` rebuilds them as views of the loaded entry.
"""

from __future__ import annotations

from typing import Any

import torch

# The dtypes of safetensors. Tensors of other dtypes are stored as their bytes (U8).
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
STRUCTURE = "__structure__"  # the entry for a structure that is too long for the header


def as_plain_tensor(value: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor without its class and graph, sharing its memory; None if it has no plain memory to store.

    That is the case for sparse, quantized, nested, meta and uninitialized tensors, and for classes that wrap other
    tensors (DTensor).
    """
    kind = type(value)
    plain = kind is torch.Tensor or kind is torch.nn.Parameter
    own_dispatch = not plain and kind.__torch_dispatch__ not in (
        torch.Tensor.__torch_dispatch__,
        torch._C._disabled_torch_dispatch_impl,
    )
    if own_dispatch or torch.nn.parameter.is_lazy(value):
        return None
    if value.is_nested or value.is_quantized or value.is_meta or value.layout is not torch.strided:
        return None
    value = value.detach()
    if not plain:
        value = value.as_subclass(torch.Tensor)
    return value.resolve_conj().resolve_neg() if value.is_conj() or value.is_neg() else value


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    return torch.empty(shape, device="meta").stride()


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether the elements fill a range of memory without gaps or overlaps, in any order of dimensions."""
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride != step:
            return False
        step *= size
    return 0 not in shape


class Entries:
    """Collects tensors; `close` chooses the tensors to store and completes the nodes that `add` returned."""

    def __init__(self) -> None:
        self._added: list[tuple[torch.Tensor, dict[str, Any], str]] = []

    def add(self, tensor: torch.Tensor, path: tuple[str, ...]) -> dict[str, Any]:
        """Return a JSON node that describes the location of the tensor once `close` was called."""
        node: dict[str, Any] = {}
        self._added.append((tensor, node, "/".join(path).encode("utf-8", "backslashreplace").decode()))
        return node

    def close(self) -> dict[str, torch.Tensor]:
        """Return the tensors to store, by name, without those that lie inside the memory of another."""
        stored: dict[str, torch.Tensor] = {}
        names = _Names()
        owners: dict[int, int] = {}  # index of a tensor -> index of the tensor that contains it
        groups: dict[Any, list[int]] = {}
        for i, (tensor, _, _) in enumerate(self._added):
            if tensor.numel():
                key = (tensor.device, tensor.dtype, tensor.untyped_storage().data_ptr())
                groups.setdefault(key, []).append(i)
        for group in groups.values():
            if len(group) > 1:
                owners |= self._owners(group)
        at: dict[int, str] = {}
        for i, (tensor, _, path) in enumerate(self._added):
            if i not in owners:
                at[i] = names.unique(path)
                stored[at[i]] = tensor
        for i, (tensor, node, _) in enumerate(self._added):
            owner = owners.get(i, i)
            node["at"] = at[owner]
            base = self._added[owner][0]
            if tensor.dtype not in DTYPES:
                node["dtype"], node["shape"] = str(tensor.dtype).removeprefix("torch."), list(base.shape)
            if base.stride() != contiguous_strides(base.shape) and is_dense(base.shape, base.stride()):
                node["strides"] = list(base.stride())
            if not _same_view(tensor, base):
                offset = (tensor.data_ptr() - base.data_ptr()) // tensor.element_size()
                node["view"] = [offset, list(tensor.shape), list(tensor.stride())]
        return stored

    def _owners(self, group: list[int]) -> dict[int, int]:
        """Return, by index, which tensors of one storage lie inside which other tensor."""

        def byte_range(i: int) -> tuple[int, int]:  # first byte, and the one after the last
            tensor = self._added[i][0]
            reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
            return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()

        owners: dict[int, int] = {}
        widest: int | None = None  # of the dense tensors so far, the one that ends last
        first_with: dict[Any, int] = {}
        # Sort so that a tensor comes after every tensor that contains it: by start, the longer one first.
        dense = {i: is_dense(self._added[i][0].shape, self._added[i][0].stride()) for i in group}
        for i in sorted(group, key=lambda i: (byte_range(i)[0], -byte_range(i)[1], not dense[i], i)):
            tensor = self._added[i][0]
            same = first_with.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), i)
            if widest is not None and byte_range(widest)[1] >= byte_range(i)[1]:
                owners[i] = widest
            elif same != i:
                owners[i] = same
            elif dense[i]:
                widest = i
        return owners


class Restored:
    """Rebuilds tensors from their nodes; tensors that shared memory share it again.

    Args:
        tensors: The stored entries by name, each with separate memory.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._bases: dict[str, torch.Tensor] = {}
        self._loaded: dict[tuple[object, ...], torch.Tensor] = {}

    def tensor(self, node: dict[str, Any], parameter: bool = False) -> torch.Tensor:
        """Return the tensor of a node.

        Raises:
            Exception: KeyError, RuntimeError or similar if the node does not fit the stored entries.
        """
        grad = bool(node.get("grad"))
        key = (node["at"], str(node.get("view")), parameter, grad)
        if key not in self._loaded:
            base = self._base(node)
            if "view" in node:
                offset, shape, strides = node["view"]
                base = base.as_strided(shape, strides, base.storage_offset() + offset)
            if parameter:
                base = torch.nn.Parameter(base, requires_grad=grad)
            elif grad:
                base = base.detach().requires_grad_()
            self._loaded[key] = base
        return self._loaded[key]

    def _base(self, node: dict[str, Any]) -> torch.Tensor:
        """Return a stored entry with the dtype and strides of its node."""
        name = node["at"]
        if name in self._bases:
            return self._bases[name]
        base = self._tensors[name]
        if "dtype" in node:
            dtype = getattr(torch, node["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"torch.{node['dtype']} is no dtype")
            if base.dtype != dtype:
                base = base.view(dtype).reshape(node["shape"])
        strides = tuple(node.get("strides", base.stride()))
        if strides != base.stride():
            if not is_dense(tuple(base.shape), strides):
                raise ValueError(f"strides {strides} do not fit shape {tuple(base.shape)}")
            base = torch.empty_strided(base.shape, strides, dtype=base.dtype, device=base.device).copy_(base)
        self._bases[name] = base
        return base


class _Names:
    """Hands out unique names."""

    def __init__(self) -> None:
        self._used_names = {"__metadata__", STRUCTURE}

    def unique(self, base: str) -> str:
        """Return the name, with a number appended if it is taken."""
        name, count = base, 1
        while name in self._used_names:
            count += 1
            name = f"{base}#{count}"
        self._used_names.add(name)
        return name


def _same_view(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have the same memory, shape and strides."""
    return first is second or (
        first.data_ptr() == second.data_ptr() and first.shape == second.shape and first.stride() == second.stride()
    )
