"""Which of torch's operators draw random numbers."""

from __future__ import annotations

from collections.abc import Container
from typing import Any


class Draws:
    """Operators that draw random numbers, by torch's own mark: asked by `in`, in place of a list of some of them.

    Args:
        listed: The list.
    """

    def __init__(self, listed: Container[Any]) -> None:
        self._listed = listed
        self._known: dict[Any, bool] = {}

    def __contains__(self, operator: Any) -> bool:
        """Whether an operator, with all its overloads (`torch.ops.aten.randn_like`), draws."""
        if operator not in self._known:
            overloads = operator.overloads() if hasattr(operator, "overloads") else ()
            self._known[operator] = operator in self._listed or any(
                draws(getattr(operator, name)) for name in overloads
            )
        return self._known[operator]


def draws(operator: Any) -> bool:
    """Whether one overload of an operator (`torch.ops.aten.randn_like.default`) draws."""
    import torch

    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
