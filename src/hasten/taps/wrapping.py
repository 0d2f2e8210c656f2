"""Replace a function by a wrapper that looks like it, in names, pickles and warnings.

Taps are never removed: the script may hold a reference to the wrapper.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

_Maker = TypeVar("_Maker", bound=Callable[..., Any])


def tap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by `make(plain)`; do nothing if it does not exist.

    The wrapper gets the module and qualified name under which it is found, so that it can be pickled. `make` must
    return a plain function: torch.compile traces through functions, but not through other callables.
    """
    plain = getattr(owner, name, None)
    if plain is None:
        return
    wrapper = functools.wraps(plain)(make(plain))
    if isinstance(owner, type):
        wrapper.__module__, wrapper.__qualname__ = owner.__module__, f"{owner.__qualname__}.{name}"
    else:
        wrapper.__module__, wrapper.__qualname__ = owner.__name__, name
    setattr(owner, name, staticmethod(wrapper) if isinstance(vars(owner).get(name), staticmethod) else wrapper)


def hidden_from_warnings(maker: _Maker) -> _Maker:
    """Make `warnings` skip the frames of functions that `maker` defines when it counts a `stacklevel`.

    torch's warnings then point to the script's line, as in a plain run, and are shown as often. Python skips frames of
    importlib's bootstrap, which it recognises by the words "importlib" and "_bootstrap" in the file's name
    (`setup_context` in CPython's `_warnings.c`), so these are put into the code's file name. If CPython changed that,
    such warnings would point to the tap's line again. Warnings from C++ do so in any case: they use the running frame.
    """
    maker.__code__ = _renamed(maker.__code__)
    return maker


def _renamed(code: CodeType) -> CodeType:
    consts = (_renamed(const) if isinstance(const, CodeType) else const for const in code.co_consts)
    return code.replace(co_filename=f"{code.co_filename} (importlib._bootstrap)", co_consts=tuple(consts))
