"""Taps on optimizers: what they are built with, their steps, and how gradients are cleared."""

from __future__ import annotations

import functools
import weakref
from time import perf_counter
from typing import Any

from hasten.evidence import Phase, facts


def install(session: Any) -> None:
    """Set the taps."""
    import torch

    run = session.run
    if run.acting("optimizer") or run.recorder is not None:
        _tap_built(torch.optim.Optimizer, session)
    if run.recorder is not None:
        _tap_steps(session)
        _tap_zero_grad(torch.optim.Optimizer, session)


def _tap_built(kind: Any, session: Any) -> None:
    build = kind.__init__

    @functools.wraps(build)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        if session.run.recorder is not None:
            held = (lambda: self) if session.trial is not None else weakref.ref(self)  # a trial is short
            session.optimizers[id(self)] = (held, facts.caller())
        session.run.optimizer(self)

    kind.__init__ = __init__


def _tap_steps(session: Any) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    run = session.run
    begun: dict[int, tuple[float, float]] = {}
    probes = session.trial is not None and session.trial.probe

    def before(optimizer: Any, *_: Any) -> None:
        if run.recorder is not None:
            if run.recorder.listeners:
                run.recorder.mark(Phase.OPTIMIZER, True)
            begun[id(optimizer)] = (perf_counter(), run.recorder.optimizer_begins())

    def after(optimizer: Any, *_: Any) -> None:
        start = begun.pop(id(optimizer), None)
        if run.recorder is None or start is None:
            return
        if probes and not run.seen.get("missing_gradients"):
            groups = optimizer.param_groups
            if any(p.requires_grad and p.grad is None for group in groups for p in group["params"]):
                run.seen["missing_gradients"] = True
        end = perf_counter()
        if run.recorder.listeners:
            run.recorder.mark(Phase.OPTIMIZER, False)
        run.recorder.optimizer_step(id(optimizer), start[0], end, start[1])

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _tap_zero_grad(kind: Any, session: Any) -> None:
    clear = kind.zero_grad
    seen = session.run.seen

    @functools.wraps(clear)
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if not set_to_none:
            if "zeroed_gradients" not in seen:
                seen["zeroed_gradients"] = facts.caller()
            if session.on_zeroed is not None:
                session.on_zeroed()
        clear(self, set_to_none)

    kind.zero_grad = zero_grad
