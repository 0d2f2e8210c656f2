"""Kinds of values in expressions, and which kinds torch's functions return."""

from __future__ import annotations

from enum import IntFlag


class Kind(IntFlag):
    """Kinds that a value may have; 0: unknown, or a plain number.

    TENSOR: a torch tensor. DEVICE: on the device, where the script uses one. GRAPH: has a graph behind it. ARRAY: a
    NumPy array. MANY: a list, tuple or dict of such.
    """

    PLAIN = 0
    TENSOR = 1
    DEVICE = 2
    GRAPH = 4
    ARRAY = 8
    MANY = 16


COMPUTED = Kind.TENSOR | Kind.DEVICE | Kind.GRAPH
PLAIN_METHODS = frozenset([
    "item", "tolist", "size", "dim", "numel", "nelement", "stride", "type", "is_contiguous", "get_device", "backward",
    "element_size", "data_ptr",
])  # fmt: skip
PLAIN_ATTRIBUTES = frozenset(
    ["shape", "device", "dtype", "ndim", "grad_fn", "requires_grad", "is_cuda", "is_leaf", "names", "layout"]
)
NO_GRADIENT = frozenset([
    "argmax", "argmin", "eq", "ne", "gt", "lt", "ge", "le", "long", "int", "bool", "byte", "sign", "round", "floor",
    "ceil", "isnan", "isinf", "isfinite", "nonzero", "detach", "argsort", "detach_", "sign", "count_nonzero", "any",
    "all", "logical_not", "logical_and", "logical_or", "equal", "multinomial", "ones_like", "zeros_like",
])  # fmt: skip
WITH_INDEX = frozenset(["max", "min", "topk", "sort", "median", "mode", "kthvalue", "cummax", "cummin"])
PLAIN_CALLS = frozenset([
    "float", "int", "bool", "len", "str", "repr", "round", "isinstance", "type", "range", "print", "id", "hash",
    "format",
])  # fmt: skip
FRESH = frozenset([
    "zeros", "ones", "full", "empty", "rand", "randn", "randint", "arange", "linspace", "eye", "tensor", "as_tensor",
    "from_numpy", "randperm", "normal",
])  # fmt: skip
