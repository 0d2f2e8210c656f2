"""Taps that Python's warnings pass over."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

_Maker = TypeVar("_Maker", bound=Callable[..., Any])


def passed_over(maker: _Maker) -> _Maker:
    """Have `warnings` pass over the functions that `maker` defines, as if their callers had called what they call.

    What torch warns of with a `stacklevel` is then of the script's line, as in a plain run, and shown as often. Python
    passes over frames of importlib's bootstrap, which it tells by these two words in a file's name (`setup_context` in
    CPython's `_warnings.c`). Were that to change, such warnings would be of the tap's line again. What C++ warns of
    itself is of the tap's line all the same: that goes by the running frame.
    """
    maker.__code__ = _renamed(maker.__code__)
    return maker


def _renamed(code: CodeType) -> CodeType:
    inside = (_renamed(one) if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.replace(co_filename=f"{code.co_filename} (importlib._bootstrap)", co_consts=tuple(inside))
