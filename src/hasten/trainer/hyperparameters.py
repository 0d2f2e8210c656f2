"""Hyper-parameters: the arguments of a module's `__init__`."""

from __future__ import annotations

import inspect
from typing import Any


class Hyperparameters(dict[str, Any]):
    """A dict whose entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyper-parameter {name!r}; there are: {', '.join(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def arguments_of(kind: type, frame: Any) -> dict[str, Any]:
    """The arguments of the `__init__` whose frame this is, and of those that called it by `super().__init__`."""
    given: dict[str, Any] = {}
    while frame is not None and frame.f_code.co_name == "__init__":
        code = frame.f_code
        if not code.co_argcount or not isinstance(frame.f_locals.get(code.co_varnames[0]), kind):
            break
        count = code.co_argcount + code.co_kwonlyargcount
        values = frame.f_locals
        given.update({name: values[name] for name in code.co_varnames[1:count] if name in values})
        if code.co_flags & inspect.CO_VARKEYWORDS:
            given.update(values.get(code.co_varnames[count + bool(code.co_flags & inspect.CO_VARARGS)], {}))
        frame = frame.f_back
    return given
