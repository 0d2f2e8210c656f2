"""Notices when torch's default floating-point type is set: threads that make samples share it with the training.

While a forward in float64 sets it, `torch.tensor([0.5])` and `image / 255` are float64 in every other thread.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

_SETTERS = ("_set_default_dtype", "_set_default_tensor_type")  # torch's own functions call these, however imported
_counting: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {}  # torch's, and what counts around it
_listeners = 0
_sets = 0
_numbers = itertools.count(1)  # two threads of a script that set it at once get two numbers


def sets() -> int:
    """Return how often it was set while somebody listened.

    What a thread makes is what the training would make only if this gives the same number before and after.
    """
    return _sets


def listen(user: Any) -> None:
    """Count from here on, until `user` is gone."""
    global _listeners
    _listeners += 1
    weakref.finalize(user, _leave).atexit = False
    if _counting:
        return
    import torch

    for name in _SETTERS:
        plain = getattr(torch._C, name)
        _counting[name] = plain, _around(plain)
        setattr(torch._C, name, _counting[name][1])


def _leave() -> None:
    global _listeners
    _listeners -= 1
    if _listeners:
        return
    import torch

    for name, (plain, ours) in list(_counting.items()):
        if getattr(torch._C, name) is ours:  # else somebody has put another around it, which calls ours
            setattr(torch._C, name, plain)
            del _counting[name]


def _around(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def counting(*args: Any) -> None:
        global _sets
        _sets = next(_numbers)  # before it is set: nobody may see the new type and the old number
        plain(*args)

    return counting
