"""Options of an optimizer's groups that have other values while it steps, and the script's own at all other times.

So schedules, logs and checkpoints see what the script has set. Wrapped is `step` of the one optimizer.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

Change = Callable[[dict[str, Any]], dict[str, Any]]
"""Returns the options of a group that are to have other values, with these."""


class InsideStep:
    """Changes options of groups inside `step`, of the optimizers that it was given.

    Args:
        change: What to change of a group, asked at each step; {} for nothing.
    """

    def __init__(self, change: Change) -> None:
        self._change = change
        self._active = True
        self._wrapped: weakref.WeakSet[Any] = weakref.WeakSet()

    def wrap(self, optimizer: Any) -> None:
        """Put a step in the place of an optimizer's that changes options first, and puts them back behind it."""
        self._active = True
        if optimizer in self._wrapped:
            return
        plain = optimizer.step

        @functools.wraps(plain)
        def step(this: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return plain(*args, **kwargs)
            before = [_put(group, self._change(group)) for group in this.param_groups]
            try:
                return plain(*args, **kwargs)
            finally:
                for group, (old, new) in zip(this.param_groups, before, strict=False):
                    _put_back(group, old, new)

        optimizer.step = types.MethodType(step, optimizer)  # a method, as a schedule that wraps it in its turn expects
        self._wrapped.add(optimizer)

    def leave(self) -> None:
        """Change no more. A step stays wrapped, and does nothing but call the optimizer's own."""
        self._active = False


def _put(group: dict[str, Any], new: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    old = {name: group[name] for name in new}
    group.update(new)
    return old, new


def _put_back(group: dict[str, Any], old: dict[str, Any], new: dict[str, Any]) -> None:
    """Give a group its own values again, but for one that a closure has set meanwhile."""
    for name, value in new.items():
        if group.get(name) is value:
            group[name] = old[name]


def scaled(rate: Any, by: float) -> Any:
    """Return a rate, a number or a tensor, times a factor; the same object, unless a new one is needed."""
    return rate if rate is None or by == 1 else rate * by
