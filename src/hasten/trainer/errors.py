"""Errors of the Trainer. Each also derives from the built-in error that Python raises in such a case."""

from __future__ import annotations

from hasten.errors import HastenError
from hasten.trainer.adapter import adapter


def misconfigured(message: str, fix: str = "") -> HastenError:
    """Return the error for flags and modules that contradict themselves.

    If another framework is in use, the error also derives from its exception class, so code that catches that works.
    """
    return adapter().error(message, fix)


class UnknownFlagError(HastenError, TypeError):
    """An unknown flag; also a TypeError, as Python raises for an unknown keyword argument."""


class WrongValueError(HastenError, ValueError):
    """A value that a flag does not accept."""


class ContradictionError(HastenError, ValueError):
    """Two flags that contradict each other."""


class NotAModuleError(HastenError, TypeError):
    """An object that is not a module was given as the model."""


def refuse_class(name: str, value: object) -> None:
    """Raise if a class was given instead of an object: `fit(Net)` instead of `fit(Net())`."""
    if isinstance(value, type):
        raise NotAModuleError(f"{name} is the class {value.__name__}", f"give one that is built: {value.__name__}(...)")
