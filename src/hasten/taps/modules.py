"""Taps on the forward of outermost modules, on torch.autograd.backward and on torch.autograd.grad.

`Module.__call__` is replaced once for all modules. A thread-local flag marks that an outermost forward is running, so
that inner modules pass at once. A module that is called while a DataLoader makes a sample belongs to the dataset (a
transform, say) and is not counted as a model.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from time import perf_counter
from typing import Any

from hasten.evidence import Phase
from hasten.evidence.facts import ModelWatch
from hasten.taps.protocol import Session
from hasten.taps.wrapping import tap

_ALL_LOSSES = 200  # first steps, whose losses are all kept
_LOSSES_EVERY = 8  # afterwards every eighth step keeps its losses if they are only displayed: keeping costs 8 us


class _ThreadState(threading.local):
    """Per-thread state: other threads may run forwards at the same time (an actor, an evaluation).

    Attributes:
        inside: Whether this thread is in the forward of an outermost module.
    """

    inside = False


_thread_state = _ThreadState()


def install(session: Session) -> None:
    """Set the taps that techniques, the recorder or `ranks` need."""
    run = session.run
    if taps_forwards(session):
        _tap_forward(session)
    if run.recorder is not None or run.techniques_at("backward"):
        _tap_backward(session)


def taps_forwards(session: Session) -> bool:
    """Return whether techniques, the recorder or `ranks` need to see forwards."""
    run = session.run
    carries = session.config.ranks is not None
    return bool(carries or run.recorder is not None or run.techniques_at("forward") or run.techniques_at("model"))


def _tap_forward(session: Session) -> None:
    import torch
    from torch._C import _is_tracing as is_tracing  # `torch.jit.is_tracing` takes three times as long
    from torch.compiler import is_compiling, is_dynamo_compiling
    from torch.nn import Module

    from hasten.data.making_samples import is_making_samples

    plain = Module.__call__
    outermost = _outermost(session, plain, torch)
    recorder = session.run.recorder
    acts = (
        session.run.techniques_at("forward") or session.run.techniques_at("model") or session.config.ranks is not None
    )
    resting = recorder if recorder is not None and recorder.may_rest and not acts else None
    grad_enabled, thread_state = torch.is_grad_enabled, _thread_state
    graph_task = torch._C._current_graph_task_id  # -1 in a thread that is in no backward

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        # `is_dynamo_compiling` first: while compiling it is a constant, so nothing below is traced, where reading a
        # clock would break the graph. `thread_state.inside` second: it ends the checks for inner modules, for 50 ns
        # each.
        if is_dynamo_compiling() or thread_state.inside or is_compiling() or is_tracing() or is_making_samples():
            return plain(self, *args, **kwargs)
        # nn.DataParallel calls its replicas in threads of their own, in which `thread_state.inside` is not set.
        if "_is_replica" in self.__dict__:
            return plain(self, *args, **kwargs)
        # The script's own `torch.utils.checkpoint` runs a block again in the backward, under the settings of the
        # forward: taken for an outermost module, the block would be compiled by itself, say, or seen under an autocast
        # that is hasten's own.
        if graph_task() != -1:
            return _run_inside(plain, self, args, kwargs)
        if resting is not None and resting.resting is not None and self.training and grad_enabled():
            return _run_inside(plain, self, args, kwargs)
        return outermost(self, args, kwargs)

    tap(Module, "__call__", lambda _: __call__)
    from hasten.techniques.recompute.forward import tell_inside

    tell_inside.append(_set_inside)


def _run_inside(plain: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module's forward without techniques; modules in it then pass at the first check."""
    _thread_state.inside = True
    try:
        return plain(module, *args, **kwargs)
    finally:
        _thread_state.inside = False


def _set_inside(inside: bool) -> bool:
    """Set this thread's flag and return the previous value.

    Techniques that recompute a forward during backward call it, so that the modules do not count as outermost.
    """
    previous, _thread_state.inside = _thread_state.inside, inside
    return previous


class _WatchedModules:
    """The outermost modules that were called, with their ModelWatch.

    Attributes:
        watches: ModelWatch by the module's id; None for a module that is not a model, such as a loss.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.watches: dict[int, ModelWatch | None] = {}

    def first_time(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelWatch | None:
        """Watch a module that is called for the first time, and apply techniques to it, if it is a model."""
        import torch

        run = self._session.run
        # Loss modules are outermost modules too. Guess: a module with parameters is a model.
        watch = None
        try:
            if next(module.parameters(), None) is not None:
                watch = ModelWatch(module, (*args, *kwargs.values()), self._session.trial is not None)
                run.models[id(module)] = watch
                for kind in ("cpu", "cuda"):
                    if torch.is_autocast_enabled(kind):
                        watch.autocast = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
                run.model(module, args)
        except Exception as error:  # an unusual module, say with `parameters` overridden: leave it alone
            run.skip(f"tap {type(module).__name__}", error)
            watch = None
        for callback in self._session.on_model:
            if next(module.parameters(), None) is not None:
                callback(module)
        self.watches[id(module)] = watch
        weakref.finalize(module, self._forget, id(module)).atexit = False
        return watch

    def _forget(self, key: int) -> None:
        """Forget a deleted module: Python may give its id to another."""
        self.watches.pop(key, None)
        self._session.run.forget(key)


def _outermost(session: Session, plain: Any, torch: Any) -> Any:
    """Return the function that runs an outermost module's forward, with techniques, and records it."""
    run, grad_enabled, thread_state = session.run, torch.is_grad_enabled, _thread_state

    def call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return plain(module, *args, **kwargs)

    wraps = bool(run.techniques_at("forward"))
    forward = run.wrap("forward", call)
    training_phase, validation_phase = int(Phase.FORWARD), int(Phase.VALIDATION)
    modules, unknown = _WatchedModules(session), object()
    watches = modules.watches

    def outermost(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch: Any = watches.get(id(module), unknown)
        if watch is unknown:
            watch = modules.first_time(module, args, kwargs)
        if watch is None:
            return plain(module, *args, **kwargs)
        recorder = run.recorder
        if recorder is not None and recorder.resting is not None and not (module.training and grad_enabled()):
            recorder.wake()  # validation is recorded in all steps
        thread_state.inside = True
        if recorder is None or recorder.resting is not None:
            try:
                return forward(module, args, kwargs) if wraps else plain(module, *args, **kwargs)
            finally:
                thread_state.inside = False
        trains, graph, may_be_validation = module.training, grad_enabled(), False
        validating = not (graph and (trains or watch.backward_through_eval))
        if validating and (trains or not watch.train_calls):
            # A forward without a graph, of a model in train mode or never trained so far. In the middle of training,
            # assume a teacher, a target network or an agent that acts, and count it as the step's forward. If a loss
            # without a graph follows, it was validation after all: see `maybe_validation_seconds` in results.py.
            current = recorder.current
            may_be_validation = current.trained or current.loader < 0 or current.loader in session.trained_loaders
            validating = not may_be_validation
        session.validating, session.without_graph = validating, not graph
        phase = validation_phase if validating else training_phase
        if recorder.listeners:
            recorder.mark(Phase(phase), True)
        start = perf_counter()
        try:
            output = forward(module, args, kwargs) if wraps else plain(module, *args, **kwargs)
        finally:
            thread_state.inside = False
            seconds = perf_counter() - start
            recorder.current.phases[phase] += seconds
            session.maybe_validation_seconds = seconds if may_be_validation else 0.0
            if recorder.listeners:
                recorder.mark(Phase(phase), False)
        if trains:
            watch.train_calls += 1
        else:
            try:
                watch.called(False, output)
            except Exception as error:  # unusual outputs may raise
                run.skip(f"tap output of {type(module).__name__}", error)
        return output

    return outermost


def _tap_backward(session: Session) -> None:
    import torch

    run = session.run
    plain = run.wrap("backward", torch.autograd.backward)
    if run.recorder is None:
        tap(torch.autograd, "backward", lambda _: plain)
        return
    looks = [0]  # backwards recorded so far, up to five; a list, so that the functions below can change it
    watching = session.on_backward
    tensor, compiling = torch.Tensor, torch.compiler.is_compiling
    # Trials compare losses step by step, and a run that is being tuned watches them: both keep every loss.
    interval = _LOSSES_EVERY if session.trial is None and session.config.auto is None else 1

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = run.recorder
        if recorder is None or recorder.resting is not None or compiling():
            return plain(tensors, *args, **kwargs)
        if recorder.listeners:
            recorder.mark(Phase.BACKWARD, True)
        start = perf_counter()
        result = plain(tensors, *args, **kwargs)
        seconds = perf_counter() - start
        thinned = recorder.steps % interval and recorder.steps >= _ALL_LOSSES and recorder.kept.every == 1
        recorder.backward(seconds, () if thinned else _losses(session, tensors, tensor))
        if recorder.listeners:
            recorder.mark(Phase.BACKWARD, False)
        for callback in watching:
            callback(tensors, args, kwargs)
        if not session.optimizers:
            recorder.stepped_by_hand()
        if looks[0] < 5 and not session.profiling:  # `profiling`: doctor's own profiler is on, not the script's
            looks[0] += 1
            _look_for_debug_tools(run.facts, torch)
        return result

    tap(torch.autograd, "backward", lambda _: backward)
    _tap_grad(session, torch, lambda: looks[0] > 0)


def _tap_grad(session: Session, torch: Any, went_backward: Callable[[], bool]) -> None:
    """Tap torch.autograd.grad, to notice double backward (a gradient penalty), which compiled code cannot do.

    In a script that uses neither an optimizer nor `backward`, `torch.autograd.grad` counts as its training's backward.
    """
    run = session.run
    plain = torch.autograd.grad

    def grad(*args: Any, **kwargs: Any) -> Any:
        recorder = run.recorder
        if torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        double_backward = kwargs.get("create_graph")
        if double_backward:
            run.facts["double_backward"] = True
        if double_backward or recorder is None or recorder.resting is not None or session.optimizers or went_backward():
            return plain(*args, **kwargs)
        inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
        if run.models and not any(isinstance(tensor, torch.nn.Parameter) for tensor in _as_tuple(inputs)):
            return plain(*args, **kwargs)  # gradients of a model's output by its input, such as forces: no training
        start = perf_counter()
        result = plain(*args, **kwargs)
        outputs = args[0] if args else kwargs.get("outputs")
        recorder.backward(perf_counter() - start, _losses(session, outputs, torch.Tensor))
        recorder.stepped_by_hand()
        return result

    tap(torch.autograd, "grad", lambda _: grad)


def _as_tuple(inputs: Any) -> tuple[Any, ...]:
    return tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)


def _losses(session: Session, tensors: Any, tensor: Any) -> list[Any]:
    """Return the one-element tensors that `backward` was called on, without a GradScaler's scale.

    They are detached and not read, so nothing waits for the device.
    """
    roots = (tensors,) if isinstance(tensors, tensor) else tensors if isinstance(tensors, list | tuple) else ()
    losses = []
    for root in roots:
        if isinstance(root, tensor) and root.numel() == 1:
            unscaled = session.unscaled.pop(id(root), None)
            losses.append(root.detach() if unscaled is None else unscaled)
    return losses


def _look_for_debug_tools(observed: dict[str, Any], torch: Any) -> None:
    if torch.is_anomaly_enabled():
        observed["anomaly"] = True
    if torch.autograd._profiler_enabled():
        observed["profiler"] = "a profiler"
