"""Fails whatever reads or writes weights that a backward has stepped, until the script's own step is reached."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

# Kinds of tensors whose storage cannot be asked for: they share none with a parameter.
_NO_STORAGE = (NotImplementedError, RuntimeError)

Range = tuple[int, int]


class AtRest(TorchDispatchMode):
    """Sees each operation from the start of a backward to the optimizer's step, in this thread and the backward's.

    Without it a recomputation, a stop-gradient through `.data`, a copy for an average or a checkpoint would read
    weights of another step than without the technique, silently.

    Args:
        fail: Called with what an operation did; it raises.
    """

    supports_higher_order_operators = True  # of compiled graphs: a recomputation with its random state

    def __init__(self, fail: Callable[[str], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fail = fail
        self._stepped: dict[int, tuple[Any, list[Range]]] = {}  # by storage, which is kept: its address stays taken
        self._own = threading.local()
        self._by_name = _ByName(self._look)
        self.open = False

    def begin(self) -> None:
        """See operations from here on."""
        self.open = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def between(self) -> None:
        """The backward is over: see from here on too what reads memory without an operation."""
        self._by_name.__enter__()  # type: ignore[no-untyped-call]
        self._by_name.open = True

    def end(self) -> bool:
        """See nothing more; return whether it was this mode's turn to end, and not that of one begun since."""
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
        """Have nobody touch these."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._stepped.setdefault(storage._cdata, (storage, []))[1].append(_range(tensor))

    @contextmanager
    def of_our_own(self) -> Iterator[None]:
        """Operations of hasten's, which may touch them."""
        former, self._own.working = getattr(self._own, "working", False), True
        try:
            yield
        finally:
            self._own.working = former

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            name = func._schema.name if hasattr(func, "_schema") else func.name()
            self._look(name.removeprefix("aten::"), (args, kwargs))
        return func(*args, **kwargs)

    def _look(self, name: str, given: Any) -> None:
        if self._stepped and not getattr(self._own, "working", False) and self._touches(given):
            self._fail(name)

    def _touches(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            try:
                found = self._stepped.get(value.untyped_storage()._cdata)
            except _NO_STORAGE:
                return False
            if found is None:
                return False
            start, end = _range(value)
            return any(start < stop and begin < end for begin, stop in found[1])
        if isinstance(value, list | tuple):
            return any(map(self._touches, value))
        return isinstance(value, dict) and any(map(self._touches, value.values()))


class _ByName(TorchFunctionMode):
    """Sees what reads or exchanges a tensor's memory without an operation: numpy, pickle, `.data`."""

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
    """Return whether a dispatch mode of the script's is on, which would be left in another order than entered."""
    return any(not isinstance(mode, AtRest) for mode in _get_current_dispatch_mode_stack())


def _range(tensor: torch.Tensor) -> Range:
    """Return the bytes of its storage that a tensor lies in."""
    if not tensor.numel():
        return 0, 0
    start = int(tensor.storage_offset())
    length = 1 + sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.itemsize, (start + length) * tensor.itemsize
