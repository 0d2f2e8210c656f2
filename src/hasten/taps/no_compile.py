"""Keeps torch.compile from compiling hasten's own functions.

Behind a graph break, and in a module compiled in place, torch.compile looks at every Python function that is called.
It knows to leave `Module.__call__` alone, but not the tap around it: one function, called by every layer, which it
would recompile for each until it gives up. Within a graph the taps are traced through as before.
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
    """Mark every function of hasten's that is loaded by now."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    # torch._dynamo.eval_frame.skip_code, without the seconds that importing torch._dynamo takes
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    for code in codes_of_hasten():
        set_code_exec_strategy(code, skip)


def codes_of_hasten() -> Iterator[CodeType]:
    """Yield the code of every function of hasten's that is loaded by now."""
    for name in list(sys.modules):
        if name.startswith("hasten."):
            yield from _codes_of(name)


@functools.cache  # forks of a process that has read them need not
def _codes_of(module: str) -> list[CodeType]:
    return list(_codes(vars(sys.modules[module]), module))


def _codes(names: Any, module: str) -> Iterator[CodeType]:
    """The code of the functions in a namespace, of its classes' methods, and of what these define inside."""
    for value in list(names.values()):
        if isinstance(value, type) and value.__module__ == module:
            yield from _codes(vars(value), module)
        function = getattr(value, "__func__", value)
        if isinstance(function, FunctionType) and function.__module__ == module:
            yield from codes_of(function.__code__)
