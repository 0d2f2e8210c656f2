"""Hyper-parameters: the arguments of a module's `__init__`."""

from __future__ import annotations

import inspect
from typing import Any


class Hyperparameters(dict[str, Any]):
    """A dict whose entries can also be read and set as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyper-parameter {name!r}; there are: {', '.join(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def arguments_of(kind: type, frame: Any) -> dict[str, Any]:
    """Return the arguments of the running `__init__`, and of the subclasses' `__init__` that called it.

    Args:
        kind: The module's class.
        frame: The frame of the innermost `__init__`.
    """
    arguments: dict[str, Any] = {}
    while frame is not None and frame.f_code.co_name == "__init__":
        code = frame.f_code
        # Walk outward through subclasses' `__init__`; stop at the `__init__` of a module that builds this as a part.
        if not code.co_argcount or not isinstance(frame.f_locals.get(code.co_varnames[0]), kind):
            break
        count = code.co_argcount + code.co_kwonlyargcount
        values = frame.f_locals
        arguments.update({name: values[name] for name in code.co_varnames[1:count] if name in values})
        if code.co_flags & inspect.CO_VARKEYWORDS:
            arguments.update(values.get(code.co_varnames[count + bool(code.co_flags & inspect.CO_VARARGS)], {}))
        frame = frame.f_back
    return arguments
