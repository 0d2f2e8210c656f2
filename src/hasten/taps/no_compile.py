"""Keep torch.compile from compiling hasten's own functions.

After a graph break, and in a module that is compiled in place, torch.compile tries to compile every Python function
that is called. It knows to skip `Module.__call__`, but not the tap around it: one function that every layer calls, and
that would be recompiled for each layer until the recompile limit. Inside a graph, taps are traced through as before.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from hasten.data.code_references import codes_of
from hasten.taps.protocol import Session


def install(_session: Session) -> None:
    """Make torch.compile skip every function of hasten that is imported by now."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    # What `torch._dynamo.eval_frame.skip_code` does, without importing torch._dynamo, which takes seconds.
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    for code in codes_of_hasten():
        set_code_exec_strategy(code, skip)


def codes_of_hasten() -> Iterator[CodeType]:
    """Yield the code objects of every function of hasten that is imported by now."""
    for name in list(sys.modules):
        if name.startswith("hasten."):
            yield from _codes_of(name)


@functools.cache  # filled once, and inherited by forks of this process
def _codes_of(module: str) -> list[CodeType]:
    return list(_codes(vars(sys.modules[module]), module))


def _codes(names: Any, module: str) -> Iterator[CodeType]:
    """Yield the code objects of a namespace's functions, of its classes' methods, and of functions nested in them."""
    for value in list(names.values()):
        if isinstance(value, type) and value.__module__ == module:
            yield from _codes(vars(value), module)
        function = getattr(value, "__func__", value)
        if isinstance(function, FunctionType) and function.__module__ == module:
            yield from codes_of(function.__code__)
