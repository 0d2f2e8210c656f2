"""Change options of an optimizer's groups for the duration of each step.

At all other times the groups have the script's own values, which schedules, logs and checkpoints therefore see. `step`
is wrapped on the instance, not on the class.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

Change = Callable[[dict[str, Any]], dict[str, Any]]
"""Takes a group, and returns the options to change with their new values."""


class InsideStep:
    """Change options of groups inside `step`, for the optimizers passed to `wrap`.

    Args:
        change: Returns the options of a group to change; called for each group at each step.
    """

    def __init__(self, change: Change) -> None:
        self._change = change
        self._active = True
        self._wrapped_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()

    def wrap(self, optimizer: Any) -> None:
        """Replace an optimizer's step by one that changes options before it and restores them after it."""
        self._active = True
        if optimizer in self._wrapped_optimizers:
            return
        plain = optimizer.step

        @functools.wraps(plain)
        def step(this: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return plain(*args, **kwargs)
            changes = [_put(group, self._change(group)) for group in this.param_groups]
            try:
                return plain(*args, **kwargs)
            finally:
                for group, (old, new) in zip(this.param_groups, changes, strict=False):
                    _put_back(group, old, new)

        optimizer.step = types.MethodType(step, optimizer)  # LR schedulers wrap `step` too, and expect a bound method
        self._wrapped_optimizers.add(optimizer)

    def leave(self) -> None:
        """Stop changing options. Steps stay wrapped, and only call the optimizer's own."""
        self._active = False


def _put(group: dict[str, Any], new: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Set options of a group. Return their old and their new values."""
    old = {name: group[name] for name in new}
    group.update(new)
    return old, new


def _put_back(group: dict[str, Any], old: dict[str, Any], new: dict[str, Any]) -> None:
    """Restore a group's own values, except those that a closure has set during the step."""
    for name, value in new.items():
        if group.get(name) is value:
            group[name] = old[name]


def scaled(rate: Any, factor: float) -> Any:
    """Return a rate (a number or a tensor) times a factor. A None, or a factor of 1, returns the same object."""
    return rate if rate is None or factor == 1 else rate * factor
