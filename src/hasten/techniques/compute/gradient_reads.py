"""Notice reads of a tensor's `.grad`, so that a script never reads the infinite gradients of an fp16 overflow.

While a `GradientReads` watches, `torch.Tensor.grad` is a property that looks at who reads it. Torch's own modules that
do not keep what they read are ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

# Modules that read gradients but keep none of them before the scaler tests whether the step overflowed.
_KEEP_NOTHING = ("torch.optim.", "torch.nn.modules.", "torch.amp.", "torch._dynamo.", "torch._inductor.", "hasten.")
_CLIPS = "torch.nn.utils."

_users: set[int] = set()
_waiting: dict[int, Callable[[bool], None]] = {}


class GradientReads:
    """Calls `report(clips)` once, before the first read of any tensor's `.grad` after `expect`.

    Args:
        report: Receives whether the reader is torch's own gradient clipping instead of the script.
    """

    def __init__(self, report: Callable[[bool], None]) -> None:
        self._report = report

    def watch(self) -> None:
        """Start watching. Each read then takes 0.08 us longer."""
        if not _users:
            _put_in_place()
        _users.add(id(self))

    def leave(self) -> None:
        """Stop watching; the last one to stop restores torch's own attribute."""
        self.settle()
        if id(self) in _users:
            _users.discard(id(self))
            if not _users:
                _put_back()

    def expect(self) -> None:
        """Call `report` at the next read."""
        if id(self) in _users:
            _waiting[id(self)] = self._report

    def settle(self) -> None:
        """Ignore reads until the next `expect`."""
        _waiting.pop(id(self), None)


def _put_in_place() -> None:
    import torch

    plain: Any = torch.Tensor.grad
    get, get_frame = plain.__get__, sys._getframe

    def grad(self: Any) -> Any:
        if _waiting:
            _report_read(get_frame(1).f_globals.get("__name__") or "")
        return get(self)

    torch.Tensor.grad = property(grad, plain.__set__, plain.__delete__, plain.__doc__)  # type: ignore[assignment]


def _put_back() -> None:
    """Restore torch's attribute: the lookup finds that of the base class again."""
    import torch

    del torch.Tensor.grad


def _report_read(module: str) -> None:
    if module.startswith(_KEEP_NOTHING):
        return
    for key, report in list(_waiting.items()):
        _waiting.pop(key, None)
        report(module.startswith(_CLIPS))
