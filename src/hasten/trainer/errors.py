"""Errors of the Trainer: what kind of Python error each is, too."""

from __future__ import annotations

from hasten.errors import HastenError
from hasten.trainer.adapter import adapter


def misconfigured(message: str, fix: str = "") -> HastenError:
    """Return the error for flags and modules that contradict themselves.

    Where another framework is in use it is of that one's class too, so code that catches that goes on to work.
    """
    return adapter().error(message, fix)


class UnknownFlagError(HastenError, TypeError):
    """A flag that there is not: an unknown keyword argument is a TypeError in Python."""


class WrongValueError(HastenError, ValueError):
    """A value outside what a flag takes."""


class ContradictionError(HastenError, ValueError):
    """Two flags that contradict each other."""


class NotAModuleError(HastenError, TypeError):
    """The wrong kind of thing as a model."""


def refuse_class(what: str, thing: object) -> None:
    """Raise for a class where one of its objects is meant: `fit(Net)` in place of `fit(Net())`."""
    if isinstance(thing, type):
        raise NotAModuleError(f"{what} is the class {thing.__name__}", f"give one that is built: {thing.__name__}(...)")
