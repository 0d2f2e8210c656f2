"""The tensors of a state as named entries: each memory once, however many tensors look at it."""

from __future__ import annotations

from typing import Any

import torch

# The dtypes of safetensors. Others are stored as their bytes.
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
STRUCTURE = "__structure__"  # the entry that holds the structure where it is too long for the header


def as_plain_tensor(value: torch.Tensor) -> torch.Tensor | None:
    """The tensor without its class and its graph, sharing its memory; None if it has no plain memory to store.

    Sparse, quantized, nested, meta and uninitialized tensors have none, nor have classes that hold other tensors
    (DTensor).
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
    """The strides of a tensor of this shape that is laid out row by row."""
    return torch.empty(shape, device="meta").stride()


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements fill one stretch of memory without gaps and overlaps, in whatever order."""
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride != step:
            return False
        step *= size
    return 0 not in shape


class Entries:
    """Collects tensors; `close` names the memories to store and completes the nodes that `add` gave."""

    def __init__(self) -> None:
        self._added: list[tuple[torch.Tensor, dict[str, Any], str]] = []

    def add(self, tensor: torch.Tensor, path: tuple[str, ...]) -> dict[str, Any]:
        """A JSON node that will say where the tensor is once the entries are closed."""
        node: dict[str, Any] = {}
        self._added.append((tensor, node, "/".join(path).encode("utf-8", "backslashreplace").decode()))
        return node

    def close(self) -> dict[str, torch.Tensor]:
        """The tensors to store, by name: those that only look at another's memory are left out."""
        found: dict[str, torch.Tensor] = {}
        names = _Names()
        owners: dict[int, int] = {}  # index of a tensor -> index of the one in whose memory it lies
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
                found[at[i]] = tensor
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
        return found

    def _owners(self, group: list[int]) -> dict[int, int]:
        """For tensors of one storage: which of them lie inside which other one."""

        def stretch(i: int) -> tuple[int, int]:
            tensor = self._added[i][0]
            reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
            return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()

        found: dict[int, int] = {}
        widest: int | None = None  # of the gapless ones so far, the one that reaches furthest
        seen: dict[Any, int] = {}
        # What covers a tensor begins no later than it and, beginning together, ends no earlier: so it comes before it.
        gapless = {i: is_dense(self._added[i][0].shape, self._added[i][0].stride()) for i in group}
        for i in sorted(group, key=lambda i: (stretch(i)[0], -stretch(i)[1], not gapless[i], i)):
            tensor = self._added[i][0]
            same = seen.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), i)
            if widest is not None and stretch(widest)[1] >= stretch(i)[1]:
                found[i] = widest
            elif same != i:
                found[i] = same
            elif gapless[i]:
                widest = i
        return found


class Restored:
    """Gives tensors back from their nodes; tensors that shared memory share it again.

    Args:
        tensors: The stored entries by name, each in memory of its own.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._bases: dict[str, torch.Tensor] = {}
        self._made: dict[tuple[object, ...], torch.Tensor] = {}

    def tensor(self, node: dict[str, Any], parameter: bool = False) -> torch.Tensor:
        """The tensor of a node.

        Raises:
            Exception: KeyError, RuntimeError and the like if the node does not fit what is stored.
        """
        grad = bool(node.get("grad"))
        key = (node["at"], str(node.get("view")), parameter, grad)
        if key not in self._made:
            base = self._base(node)
            if "view" in node:
                offset, shape, strides = node["view"]
                base = base.as_strided(shape, strides, base.storage_offset() + offset)
            if parameter:
                base = torch.nn.Parameter(base, requires_grad=grad)
            elif grad:
                base = base.detach().requires_grad_()
            self._made[key] = base
        return self._made[key]

    def _base(self, node: dict[str, Any]) -> torch.Tensor:
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
    def __init__(self) -> None:
        self._taken = {"__metadata__", STRUCTURE}

    def unique(self, wanted: str) -> str:
        name, count = wanted, 1
        while name in self._taken:
            count += 1
            name = f"{wanted}#{count}"
        self._taken.add(name)
        return name


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (
        one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
    )
