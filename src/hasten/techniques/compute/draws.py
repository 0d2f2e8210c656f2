"""Tell which of torch's operators draw random numbers, by torch's own tag."""

from __future__ import annotations

from collections.abc import Container
from typing import Any


class RandomOperators:
    """Container of all operators that draw random numbers, to replace an incomplete list of torch's (`rand_ops`).

    An operator is in it if it is listed, or if torch has tagged one of its overloads as random.

    Args:
        listed: The list to replace.
    """

    def __init__(self, listed: Container[Any]) -> None:
        self._listed = listed
        self._answers: dict[Any, bool] = {}

    def __contains__(self, operator: Any) -> bool:
        """Return whether any overload of an operator (`torch.ops.aten.randn_like`) draws random numbers."""
        if operator not in self._answers:
            overloads = operator.overloads() if hasattr(operator, "overloads") else ()
            self._answers[operator] = operator in self._listed or any(
                draws(getattr(operator, name)) for name in overloads
            )
        return self._answers[operator]


def draws(operator: Any) -> bool:
    """Return whether one overload of an operator (`torch.ops.aten.randn_like.default`) draws random numbers."""
    import torch

    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
