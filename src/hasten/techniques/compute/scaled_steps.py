"""Optimizer steps under loss scaling: one whose gradients overflowed changes nothing."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from hasten.techniques.base import Call
from hasten.techniques.compute.loss_scaling import LossScaler


def guard(optimizer: Any, scaler: LossScaler, may_step: Callable[[Any], bool]) -> None:
    """Let an optimizer step only where `may_step(optimizer)`, asked once its gradients are there."""
    import torch

    scaler.joined(optimizer)
    step = _unbound_step(optimizer)
    alone = type(optimizer).__module__.startswith("torch.optim.") and type(optimizer).__name__ != "LBFGS"

    @functools.wraps(optimizer.step)
    def guarded(this: Any, *args: Any, **kwargs: Any) -> Any:
        closure = args[0] if args else kwargs.get("closure")
        if scaler.stop_reason or scaler.paused or closure is None:
            return step(this, *args, **kwargs) if may_step(this) else None
        rest, named = args[1:], {name: value for name, value in kwargs.items() if name != "closure"}
        if alone:  # torch's own optimizers call it once, before they change anything: so it can come first
            with torch.enable_grad():
                loss = closure()
            if may_step(this):
                step(this, None, *rest, **named)
            return loss
        first = _First(closure, scaler, lambda: may_step(this))
        try:
            return step(this, first, *rest, **named)
        except _OverflowedError:
            return first.loss

    optimizer.step = types.MethodType(guarded, optimizer)


class _OverflowedError(Exception):
    """Leaves an optimizer's step whose gradients overflowed."""


class _First:
    """A closure for an optimizer that calls it by itself, before it changes anything: its overflow ends the step.

    Where it is called again in a step (a line search, sharpness-aware steps), that is too late, so nothing may
    overflow: fp16 is let go before the second call.
    """

    def __init__(self, closure: Call, scaler: LossScaler, may_step: Callable[[], bool]) -> None:
        self.loss: Any = None
        self._closure, self._scaler, self._may_step = closure, scaler, may_step
        self._calls = 0

    def __call__(self) -> Any:
        self._calls += 1
        if self._calls == 2:
            self._scaler.leave("an optimizer differentiates more than once a step")
        self.loss = self._closure()
        if self._calls == 1 and not self._may_step():
            raise _OverflowedError
        return self.loss


def _unbound_step(optimizer: Any) -> Call:
    """The optimizer's `step` as a function of the optimizer; a schedule may have put one of its own in its place."""
    own = vars(optimizer).get("step")
    if own is None:
        return type(optimizer).step  # type: ignore[no-any-return]
    if isinstance(own, types.MethodType):
        return own.__func__

    def step(_: Any, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return step
