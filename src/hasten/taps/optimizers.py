"""Taps on optimizers: what they are built with, their steps, and how gradients are cleared."""

from __future__ import annotations

import functools
import weakref
from time import perf_counter
from typing import Any

from hasten.evidence import Phase, facts
from hasten.taps.protocol import Session
from hasten.taps.wrapping import tap

_NOTHING: list[float] = []  # what a closure did in a step that has none


def install(session: Session) -> None:
    """Set the taps."""
    import torch

    run = session.run
    if run.acting("optimizer") or run.recorder is not None:
        tap(torch.optim.Optimizer, "__init__", lambda plain: _building(plain, session))
    if run.recorder is not None:
        _tap_steps(session)
        tap(torch.optim.Optimizer, "zero_grad", lambda plain: _clearing(plain, session))


def _building(build: Any, session: Session) -> Any:
    import torch

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        if session.run.recorder is not None:
            held = (lambda: self) if session.trial is not None else weakref.ref(self)  # a trial is short
            session.optimizers[id(self)] = (held, facts.caller())
        session.run.optimizer(self)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # Many scripts end with `destroy_process_group()`: when the evidence is put together there is none.
            session.run.seen["distributed"] = torch.distributed.get_world_size()

    return __init__


def _tap_steps(session: Session) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    run = session.run
    begun: dict[int, tuple[float, float, list[float]]] = {}
    probes = session.trial is not None and session.trial.probe

    def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = run.recorder
        if recorder is None or recorder.resting is not None:
            return None
        if recorder.listeners:
            recorder.mark(Phase.OPTIMIZER, True)
        if len(args) < 2 and not kwargs:  # no closure: what nearly every optimizer step of the world is
            begun[id(optimizer)] = (perf_counter(), -1.0, _NOTHING)
            return None
        inside: list[float] = []
        begun[id(optimizer)] = (perf_counter(), recorder.optimizer_begins(), inside)
        return _with_timed_closure(args, kwargs, inside)

    def after(optimizer: Any, *_: Any) -> None:
        start, recorder = begun.pop(id(optimizer), None), run.recorder
        if recorder is None:
            return
        if start is None:
            recorder.rested_optimizer_step(id(optimizer))
            return
        if probes and not run.seen.get("missing_gradients"):
            groups = optimizer.param_groups
            if any(p.requires_grad and p.grad is None for group in groups for p in group["params"]):
                run.seen["missing_gradients"] = True
        end = perf_counter()
        if recorder.listeners:
            recorder.mark(Phase.OPTIMIZER, False)
        if start[2] is _NOTHING:
            recorder.optimizer_step(id(optimizer), start[0], end, -1.0)
            return
        counted, inside = recorder.optimizer_begins() - start[1], sum(start[2])
        # What a closure did beside forward and backward is the script's, or its trainer's, and not the optimizer's.
        recorder.optimizer_step(id(optimizer), start[0] + max(0.0, inside - counted), end, start[1])

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _with_timed_closure(args: tuple[Any, ...], kwargs: dict[str, Any], inside: list[float]) -> Any:
    """The arguments of an optimizer's step with a closure that notes its seconds in `inside`; None without one."""
    named = callable(kwargs.get("closure"))
    closure = kwargs["closure"] if named else args[1] if len(args) == 2 and callable(args[1]) else None
    if closure is None:
        return None

    @functools.wraps(closure, updated=())
    def timed(*given: Any, **named_too: Any) -> Any:
        start = perf_counter()
        try:
            return closure(*given, **named_too)
        finally:
            inside.append(perf_counter() - start)

    return (args, {**kwargs, "closure": timed}) if named else ((args[0], timed), kwargs)


def _clearing(clear: Any, session: Session) -> Any:
    seen = session.run.seen

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if not set_to_none:
            if "zeroed_gradients" not in seen:
                seen["zeroed_gradients"] = facts.caller()
            if session.on_zeroed is not None:
                session.on_zeroed()
        clear(self, set_to_none)

    return zero_grad
