"""Taps on optimizers: apply techniques to them, and record their steps and how gradients are cleared."""

from __future__ import annotations

import functools
import weakref
from time import perf_counter
from typing import Any

from hasten.evidence import Phase, facts
from hasten.taps.protocol import Session
from hasten.taps.wrapping import tap

_NO_CLOSURE: list[float] = []  # marks a step without a closure


def install(session: Session) -> None:
    """Set the taps."""
    import torch

    run = session.run
    if run.techniques_at("optimizer") or run.recorder is not None:
        tap(torch.optim.Optimizer, "__init__", lambda plain: _building(plain, session))
    if run.recorder is not None:
        _tap_steps(session)
        tap(torch.optim.Optimizer, "zero_grad", lambda plain: _clearing(plain, session))


def _building(build: Any, session: Session) -> Any:
    import torch

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        if session.run.recorder is not None:
            # A strong reference only in a trial, which is short: its facts can then be read at the end.
            reference = (lambda: self) if session.trial is not None else weakref.ref(self)
            session.optimizers[id(self)] = (reference, facts.caller())
        session.run.optimizer(self)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # Read now: many scripts end with `destroy_process_group()`, before the evidence is written.
            session.run.facts["distributed"] = torch.distributed.get_world_size()

    return __init__


def _tap_steps(session: Session) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    run = session.run
    # Optimizer's id -> when its step began, the sum of the training step's phases by then (-1: it has no closure), and
    # the seconds of each call of its closure.
    begun: dict[int, tuple[float, float, list[float]]] = {}
    probes = session.trial is not None and session.trial.probe

    def before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = run.recorder
        if recorder is None or recorder.resting is not None:
            return None
        if recorder.listeners:
            recorder.mark(Phase.OPTIMIZER, True)
        if len(args) < 2 and not kwargs:  # no closure, as in nearly every training
            begun[id(optimizer)] = (perf_counter(), -1.0, _NO_CLOSURE)
            return None
        in_closure: list[float] = []
        begun[id(optimizer)] = (perf_counter(), recorder.optimizer_begins(), in_closure)
        return _with_timed_closure(args, kwargs, in_closure)

    def after_step(optimizer: Any, *_: Any) -> None:
        start, recorder = begun.pop(id(optimizer), None), run.recorder
        if recorder is None:
            return
        if start is None:
            recorder.rested_optimizer_step(id(optimizer))
            return
        if probes and not run.facts.get("missing_gradients"):
            groups = optimizer.param_groups
            if any(p.requires_grad and p.grad is None for group in groups for p in group["params"]):
                run.facts["missing_gradients"] = True
        end = perf_counter()
        if recorder.listeners:
            recorder.mark(Phase.OPTIMIZER, False)
        if start[2] is _NO_CLOSURE:
            recorder.optimizer_step(id(optimizer), start[0], end, -1.0)
            return
        recorded, in_closure = recorder.optimizer_begins() - start[1], sum(start[2])
        # A closure's seconds that are neither forward nor backward belong to the script or its trainer, not to the
        # optimizer: start the step that much later.
        recorder.optimizer_step(id(optimizer), start[0] + max(0.0, in_closure - recorded), end, start[1])

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


def _with_timed_closure(args: tuple[Any, ...], kwargs: dict[str, Any], in_closure: list[float]) -> Any:
    """Return a step's arguments with a closure that appends its seconds to `in_closure`; None without a closure."""
    named = callable(kwargs.get("closure"))
    closure = kwargs["closure"] if named else args[1] if len(args) == 2 and callable(args[1]) else None
    if closure is None:
        return None

    @functools.wraps(closure, updated=())
    def timed(*closure_args: Any, **closure_kwargs: Any) -> Any:
        start = perf_counter()
        try:
            return closure(*closure_args, **closure_kwargs)
        finally:
            in_closure.append(perf_counter() - start)

    return (args, {**kwargs, "closure": timed}) if named else ((args[0], timed), kwargs)


def _clearing(clear: Any, session: Session) -> Any:
    observed = session.run.facts

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if not set_to_none:
            if "zeroed_gradients" not in observed:
                observed["zeroed_gradients"] = facts.caller()
            if session.on_zeroed is not None:
                session.on_zeroed()
        clear(self, set_to_none)

    return zero_grad
