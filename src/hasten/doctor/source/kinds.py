"""Kinds of values that expressions have, and functions and methods grouped by the kind they return."""

from __future__ import annotations

from enum import IntFlag


class Kind(IntFlag):
    """Flags that describe a value. Several may hold: a loss is TENSOR | DEVICE | GRAPH.

    PLAIN (0): an unknown value, or a plain number. TENSOR: a torch tensor. DEVICE: on the device, if the script uses
    one. GRAPH: it requires gradients, and so keeps an autograd graph alive. ARRAY: a NumPy array. CONTAINER: a list,
    tuple or dict of values with the other flags.
    """

    PLAIN = 0
    TENSOR = 1
    DEVICE = 2
    GRAPH = 4
    ARRAY = 8
    CONTAINER = 16


COMPUTED = Kind.TENSOR | Kind.DEVICE | Kind.GRAPH  # the output of a model
# Methods of a tensor that return a Python value, or nothing.
PLAIN_METHODS = frozenset([
    "item", "tolist", "size", "dim", "numel", "nelement", "stride", "type", "is_contiguous", "get_device", "backward",
    "element_size", "data_ptr",
])  # fmt: skip
# Attributes of a tensor that are not tensors.
PLAIN_ATTRIBUTES = frozenset(
    ["shape", "device", "dtype", "ndim", "grad_fn", "requires_grad", "is_cuda", "is_leaf", "names", "layout"]
)
# Functions and methods whose result has no graph, whatever their input.
NO_GRADIENT = frozenset([
    "argmax", "argmin", "eq", "ne", "gt", "lt", "ge", "le", "long", "int", "bool", "byte", "sign", "round", "floor",
    "ceil", "isnan", "isinf", "isfinite", "nonzero", "detach", "argsort", "detach_", "sign", "count_nonzero", "any",
    "all", "logical_not", "logical_and", "logical_or", "equal", "multinomial", "ones_like", "zeros_like",
])  # fmt: skip
# Functions that may return (values, indices): the second has no graph.
WITH_INDEX = frozenset(["max", "min", "topk", "sort", "median", "mode", "kthvalue", "cummax", "cummin"])
# Builtins that return a Python value.
PLAIN_CALLS = frozenset([
    "float", "int", "bool", "len", "str", "repr", "round", "isinstance", "type", "range", "print", "id", "hash",
    "format",
])  # fmt: skip
# Functions of torch that create a tensor.
FRESH = frozenset([
    "zeros", "ones", "full", "empty", "rand", "randn", "randint", "arange", "linspace", "eye", "tensor", "as_tensor",
    "from_numpy", "randperm", "normal",
])  # fmt: skip
