"""How a function is replaced by one that also listens, so that nobody else can tell.

What is tapped stays so until the process ends: the script may keep the function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

_Maker = TypeVar("_Maker", bound=Callable[..., Any])


def tap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(plain)` in the place of `owner.name`; nothing happens where there is no such thing.

    It keeps the name under which it is found, by which it is pickled.
    Replaced are plain functions only: torch.compile traces through them, and not through other callables.
    """
    plain = getattr(owner, name, None)
    if plain is None:
        return
    ours = functools.wraps(plain)(make(plain))
    if isinstance(owner, type):
        ours.__module__, ours.__qualname__ = owner.__module__, f"{owner.__qualname__}.{name}"
    else:
        ours.__module__, ours.__qualname__ = owner.__name__, name
    setattr(owner, name, staticmethod(ours) if isinstance(vars(owner).get(name), staticmethod) else ours)


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
