"""Counts changes of torch's default dtype, which threads that make samples share with the training.

While a float64 forward in the training sets it, `torch.tensor([0.5])` and `image / 255` are float64 in every thread.
So a sample made in a thread is only used if the count did not change while it was made.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

# Patched in torch._C: torch's public setters call them there, even after `from torch import set_default_dtype`.
_SETTERS = ("_set_default_dtype", "_set_default_tensor_type")
_counting: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {}  # torch's setter and our wrapper, by name
_listeners = 0
_sets = 0
_numbers = itertools.count(1)  # atomic, unlike `_sets += 1`: two threads that set the dtype at once get two numbers


def sets() -> int:
    """Return how often the default dtype was set while there were listeners.

    A thread's result equals what the training would make only if this number is the same before and after.
    """
    return _sets


def listen(user: Any) -> None:
    """Count changes from now on, until `user` is garbage-collected."""
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
        if getattr(torch._C, name) is ours:  # if somebody has wrapped our wrapper, leave both in place
            setattr(torch._C, name, plain)
            del _counting[name]


def _around(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def counting(*args: Any) -> None:
        global _sets
        _sets = next(_numbers)  # before the change: no thread may see the new dtype with the old number
        plain(*args)

    return counting
