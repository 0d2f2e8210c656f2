"""Replace functions of torch by wrappers, and restore them.

Several techniques, and the script itself, may replace the same function. Wrappers therefore form a stack per function:
restoring one takes effect as soon as it is on top, and never undoes a replacement that the script made.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

_in_place: dict[int, ReplacedFunction] = {}  # id of a wrapper that is in place -> its Replaced
_known_to_torchscript: list[Any] = []


class ReplacedFunction:
    """A function and the wrapper that replaces it. TorchScript compiles the wrapper as the plain function.

    Args:
        owner: Class or module whose attribute the function is.
        name: Name of the attribute.
        change: Takes the plain function and returns the wrapper.
    """

    def __init__(self, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
        self._owner, self._name, self._change = owner, name, change
        self._plain: Any = None
        self._wrapper: Any = None
        self._inherited = False
        self._in_use = False
        self._is_static = isinstance(owner, type) and isinstance(inspect.getattr_static(owner, name), staticmethod)

    def put_in_place(self) -> None:
        """Replace the current function, which may be torch's or the script's own, by the wrapper."""
        self._in_use = True
        current = getattr(self._owner, self._name)
        if self._is_below(current):
            return
        if current is not self._plain:
            _in_place.pop(id(self._wrapper), None)
            self._plain = current
            self._inherited = self._name not in vars(self._owner)
            self._wrapper = functools.wraps(current)(self._change(current))
            # By functools.wraps it finds the plain function's source, but would look names up among those of ours.
            self._wrapper.__prepare_scriptable__ = lambda: current
            _tell_torchscript(current, self._wrapper)
        _in_place[id(self._wrapper)] = self
        setattr(self._owner, self._name, self._static(self._wrapper))

    def put_back(self) -> None:
        """Restore the function that was replaced, unless the script has replaced the wrapper since.

        If another technique has wrapped our wrapper, the plain function comes back once that one is restored too.
        """
        self._in_use = False
        while (top := _in_place.get(id(getattr(self._owner, self._name)))) is not None and not top._in_use:
            if top._inherited:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, top._static(top._plain))
            del _in_place[id(top._wrapper)]

    def _is_below(self, function: Any) -> bool:
        """Return whether a function is our wrapper, or other techniques' wrappers around it."""
        while (top := _in_place.get(id(function))) is not None:
            if top is self:
                return True
            function = top._plain
        return False

    def _static(self, function: Any) -> Any:
        return staticmethod(function) if self._is_static else function


class Replacements:
    """Set of functions that stay replaced in this process while at least one user needs it.

    Args:
        functions: Returns them; called when they are first needed, after torch was imported.
    """

    def __init__(self, functions: Callable[[], Iterable[ReplacedFunction]]) -> None:
        self._make = functions
        self._functions: list[ReplacedFunction] | None = None
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()

    def need(self, user: Any) -> None:
        """Put the wrappers in place, until `user` and all other users leave."""
        if self._functions is None:
            self._functions = list(self._make())
        if not len(self._users):
            for function in self._functions:
                function.put_in_place()
        self._users.add(user)

    def leave(self, user: Any) -> None:
        """Restore the functions, if no other user needs them."""
        if user not in self._users:
            return
        self._users.discard(user)
        if not len(self._users):
            for function in reversed(self._functions or []):
                function.put_back()


def plain_of(function: Any) -> Any:
    """Return the function behind the techniques' wrappers; the function itself if it is none of them."""
    while (top := _in_place.get(id(function))) is not None:
        function = top._plain
    return function


def _tell_torchscript(plain: Any, ours: Any) -> None:
    """Let `torch.jit.script` compile calls of `ours` as calls of `plain`."""
    from torch.jit._builtins import _get_builtin_table, _register_builtin

    if operator := _get_builtin_table().get(id(plain)):
        _known_to_torchscript.append(ours)  # kept alive: TorchScript identifies it by its id
        _register_builtin(ours, operator)
