"""Functions of torch's that a technique replaces by ones that do more, and puts back when it is through."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

_in_place: dict[int, Replaced] = {}  # by the id of the function that does more
_known_to_torchscript: list[Any] = []


class Replaced:
    """A function and the one that does more, also known to TorchScript as what it was.

    Args:
        owner: The class or module that it is found in.
        name: Its name there.
        change: Makes the function that does more.
    """

    def __init__(self, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
        self._owner, self._name, self._change = owner, name, change
        self._plain: Any = None
        self._ours: Any = None
        self._inherited = False
        self._wanted = False
        self._is_static = isinstance(owner, type) and isinstance(inspect.getattr_static(owner, name), staticmethod)

    def put_in_place(self) -> None:
        """Put ours in place of what stands there, torch's or a script's own."""
        self._wanted = True
        found = getattr(self._owner, self._name)
        if self._is_below(found):
            return
        if found is not self._plain:
            _in_place.pop(id(self._ours), None)
            self._plain = found
            self._inherited = self._name not in vars(self._owner)
            self._ours = functools.wraps(found)(self._change(found))
            _tell_torchscript(found, self._ours)
        _in_place[id(self._ours)] = self
        setattr(self._owner, self._name, self._static(self._ours))

    def put_back(self) -> None:
        """Put back what stood there, unless a script has replaced ours since.

        Where another technique has replaced ours, what stood there comes back once that one is put back too.
        """
        self._wanted = False
        while (top := _in_place.get(id(getattr(self._owner, self._name)))) is not None and not top._wanted:
            if top._inherited:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, top._static(top._plain))
            del _in_place[id(top._ours)]

    def _is_below(self, function: Any) -> bool:
        """Whether a function is ours, or another technique's around ours."""
        while (top := _in_place.get(id(function))) is not None:
            if top is self:
                return True
            function = top._plain
        return False

    def _static(self, function: Any) -> Any:
        return staticmethod(function) if self._is_static else function


class Replacements:
    """Functions that are replaced as long as somebody needs it, one set in a process.

    Args:
        functions: Gives them; called when they are first needed, once torch is imported.
    """

    def __init__(self, functions: Callable[[], Iterable[Replaced]]) -> None:
        self._make = functions
        self._functions: list[Replaced] | None = None
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()

    def need(self, user: Any) -> None:
        """Put them in place, if they are not, until `user` and all others need them no more."""
        if self._functions is None:
            self._functions = list(self._make())
        if not len(self._users):
            for function in self._functions:
                function.put_in_place()
        self._users.add(user)

    def leave(self, user: Any) -> None:
        """Put them back, if nobody else needs them."""
        if user not in self._users:
            return
        self._users.discard(user)
        if not len(self._users):
            for function in reversed(self._functions or []):
                function.put_back()


def plain_of(function: Any) -> Any:
    """Return what stood where techniques have put this function, or the function if none has."""
    while (top := _in_place.get(id(function))) is not None:
        function = top._plain
    return function


def _tell_torchscript(plain: Any, ours: Any) -> None:
    """Let `torch.jit.script` compile what calls `ours` as if it called `plain`."""
    from torch.jit._builtins import _get_builtin_table, _register_builtin

    if operator := _get_builtin_table().get(id(plain)):
        _known_to_torchscript.append(ours)  # TorchScript knows it by its id
        _register_builtin(ours, operator)
