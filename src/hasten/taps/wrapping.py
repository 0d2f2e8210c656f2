"""How a function is replaced by one that also listens, so that nobody else can tell, and put back.

What is tapped stays so until the process ends: the script may keep the function. `tapped()` is the table of what is
tapped by which module; `restore` takes all of it back, the last tap first.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeVar

_Maker = TypeVar("_Maker", bound=Callable[..., Any])


@dataclass(frozen=True)
class Tap:
    """One function that was replaced.

    Attributes:
        owner: The class or module.
        name: Under which the function is found there.
        by: The module of hasten's that replaced it.
        ours: What is there now.
        plain: What was there; None where the class has inherited it.
    """

    owner: Any
    name: str
    by: str
    ours: Any
    plain: Any


_taps: list[Tap] = []


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
    put(owner, name, ours, sys._getframe(1).f_globals["__name__"])


def put(owner: Any, name: str, ours: Any, by: str) -> None:
    """Put something of hasten's own making in the place of `owner.name`, and note it in the table."""
    plain = vars(owner).get(name)
    if isinstance(plain, staticmethod):
        ours = staticmethod(ours)
    setattr(owner, name, ours)
    _taps.append(Tap(owner, name, by, ours, plain))


def untap(owner: Any, name: str) -> None:
    """Put back what was there before the last tap on `owner.name`; nothing happens where somebody has replaced it."""
    for number in range(len(_taps) - 1, -1, -1):
        if _taps[number].owner is owner and _taps[number].name == name:
            _put_back(_taps.pop(number))
            return


def restore() -> None:
    """Put back all that was tapped in this process."""
    while _taps:
        _put_back(_taps.pop())


def _put_back(tap: Tap) -> None:
    if vars(tap.owner).get(tap.name) is not tap.ours:
        return  # somebody else's function stands in front of ours
    if tap.plain is None:
        delattr(tap.owner, tap.name)
    else:
        setattr(tap.owner, tap.name, tap.plain)


def tapped() -> list[tuple[str, str]]:
    """Return the table: what is tapped now, each with the module that did it, in the order in which it was done."""
    return [(f"{_path(tap.owner)}.{tap.name}", tap.by) for tap in _taps]


def _path(owner: Any) -> str:
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else str(owner.__name__)


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
