"""Flags as attributes of a Trainer."""

from __future__ import annotations

from typing import Any


class FlagAttribute:
    """A flag as an attribute of a Trainer: read from its Config, which is replaced, and checked, when it is set."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.__doc__ = f"The flag `{name}`."

    def __get__(self, trainer: Any, kind: type | None = None) -> Any:
        return self if trainer is None else getattr(trainer.config, self._name)

    def __set__(self, trainer: Any, value: Any) -> None:
        trainer.configure(**{self._name: value})
