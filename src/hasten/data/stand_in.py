"""Puts a function of hasten's in the place of one of the script's, which stays the object that the script sees."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

_OWN = frozenset({"_hasten_function", "_hasten_call", "__reduce__", "__reduce_ex__"})


class StandIn:
    """Calls another function than the script's; everything else that is asked of it is the script's function's.

    A dataset's `loader` may be any object that can be called. The script may set its attributes between epochs
    (`dataset.loader.size = 64`), call its methods, ask for its class, or compare it with the function itself.

    Args:
        function: The script's.
        call: Called in its place. Its `__reduce__` gives what a pickled or copied stand-in becomes.
    """

    __slots__ = ("__weakref__", "_hasten_call", "_hasten_function")

    def __init__(self, function: Any, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_hasten_function", function)
        object.__setattr__(self, "_hasten_call", call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._hasten_call(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__
        if name in _OWN:
            return own(self, name)
        # What looks into wrappers (inspect, snapshots) finds the function there.
        function = own(self, "_hasten_function")
        return function if name == "__wrapped__" else getattr(function, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._hasten_function, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._hasten_function, name)

    def __eq__(self, other: object) -> bool:
        function: Any = self._hasten_function
        return bool(function == (other._hasten_function if type(other) is StandIn else other))

    def __hash__(self) -> int:
        return hash(self._hasten_function)

    def __repr__(self) -> str:
        return repr(self._hasten_function)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._hasten_call.__reduce__()


def called_by(function: Any) -> Any:
    """Return what a stand-in calls; None if the function is no stand-in."""
    return function._hasten_call if type(function) is StandIn else None


def plain_copy(function: Any) -> Any:
    """Return what `__reduce__` gives to make a copy of the script's function: hasten is not needed to read it."""
    return operator.getitem, ((function,), 0)
