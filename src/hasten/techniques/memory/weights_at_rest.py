"""Raise an error for any read or write of weights that a backward has stepped, until the script's own step.

A dispatch mode sees all operations from the start of a backward on, in this thread and in autograd's. After the
backward a function mode joins it, for accesses that are no operations (`.data`, numpy, pickle). Tensors are recognized
by their storage and the bytes they use of it, so views and aliases are recognized too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

# Raised by kinds of tensors that have no storage (sparse ones, wrappers): they cannot share a parameter's.
_NO_STORAGE = (NotImplementedError, RuntimeError)

Range = tuple[int, int]


class WeightsWatch(TorchDispatchMode):
    """Dispatch mode from the start of a backward to the optimizer's step, in this thread and the backward's.

    Without it, a recomputation, a stop-gradient through `.data`, or a copy for an average or a checkpoint would
    silently read weights of another step than without the technique.

    Args:
        fail: Called with the name of the operation that touches stepped weights; it raises.
    """

    # Compiled graphs contain such operators: a recomputation that restores its random state.
    supports_higher_order_operators = True

    def __init__(self, fail: Callable[[str], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fail = fail
        # Address of a storage -> the storage, and the ranges of bytes to watch. Holding the storage keeps its address
        # from being reused.
        self._stepped: dict[int, tuple[Any, list[Range]]] = {}
        self._own = threading.local()
        self._by_name = _ByName(self._look)
        self.open = False

    def begin(self) -> None:
        """Watch operations from now on."""
        self.open = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def between(self) -> None:
        """Watch, after the backward, accesses to memory that are no operations as well."""
        self._by_name.__enter__()  # type: ignore[no-untyped-call]
        self._by_name.open = True

    def end(self) -> bool:
        """Stop watching. Return False if it cannot, because a mode that was entered later is still on."""
        self._stepped = {}
        if not self.open:
            return True
        if self._by_name.open:
            functions = _get_current_function_mode_stack()
            if not functions or functions[-1] is not self._by_name:
                return False
            self._by_name.__exit__(None, None, None)
            self._by_name.open = False
        stack = _get_current_dispatch_mode_stack()
        if not stack or stack[-1] is not self:
            return False
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.open = False
        return True

    def add(self, *tensors: torch.Tensor) -> None:
        """Watch these tensors too."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._stepped.setdefault(storage._cdata, (storage, []))[1].append(_range(tensor))

    @contextmanager
    def of_our_own(self) -> Iterator[None]:
        """Allow hasten's own operations within the context to touch watched tensors."""
        working_before, self._own.working = getattr(self._own, "working", False), True
        try:
            yield
        finally:
            self._own.working = working_before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            name = func._schema.name if hasattr(func, "_schema") else func.name()
            self._look(name.removeprefix("aten::"), (args, kwargs))
        return func(*args, **kwargs)

    def _look(self, name: str, args: Any) -> None:
        if self._stepped and not getattr(self._own, "working", False) and self._touches(args):
            self._fail(name)

    def _touches(self, value: Any) -> bool:
        """Return whether an operation's nested arguments contain memory of a watched tensor."""
        if isinstance(value, torch.Tensor):
            try:
                watched = self._stepped.get(value.untyped_storage()._cdata)
            except _NO_STORAGE:
                return False
            if watched is None:
                return False
            start, end = _range(value)
            return any(start < stop and begin < end for begin, stop in watched[1])
        if isinstance(value, list | tuple):
            return any(map(self._touches, value))
        return isinstance(value, dict) and any(map(self._touches, value.values()))


class _ByName(TorchFunctionMode):
    """Function mode that sees functions which access or replace a tensor's memory without an operation."""

    def __init__(self, look: Callable[[str, Any], None]) -> None:
        super().__init__()
        self._look = look
        self.open = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if name := _PAST_OPERATIONS.get(func):
            self._look(name, args[:1])
        return func(*args, **(kwargs or {}))


_PAST_OPERATIONS: dict[Any, str] = {
    torch.Tensor.data.__get__: "data",  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: "data",  # type: ignore[attr-defined]
    **{
        getattr(torch.Tensor, name): name
        for name in ("numpy", "tolist", "__array__", "__dlpack__", "__reduce_ex__", "data_ptr", "untyped_storage")
    },
}


def others_on() -> bool:
    """Return whether the script has a dispatch mode on; modes are left in reverse order, so this one could not be."""
    return any(not isinstance(mode, WeightsWatch) for mode in _get_current_dispatch_mode_stack())


def _range(tensor: torch.Tensor) -> Range:
    """Return the range of bytes that a tensor spans in its storage, gaps included."""
    if not tensor.numel():
        return 0, 0
    start = int(tensor.storage_offset())
    length = 1 + sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.itemsize, (start + length) * tensor.itemsize
