"""Hook a witness into torch: batches, outermost forwards, backwards, optimizer steps."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import Any

import torch
from torch._C import _is_tracing as is_tracing
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from hasten.check.noise import Noise
from hasten.check.witness import Diverged, Witness
from hasten.techniques.memory import step_in_backward


def listen(witness: Witness, *, backwards: bool = True) -> None:
    """Make a witness see everything that happens in this process from now on. For the check's own processes only.

    Call it after techniques have set their wrappers, so that the witness sees their results.

    Args:
        witness: The witness.
        backwards: Whether to note the losses from which `torch.autograd.backward` starts; False if the caller does.
    """
    os.register_at_fork(after_in_child=functools.partial(setattr, witness, "active", False))
    noise = Noise(witness.options.noise, witness.options.seed) if witness.options.noise else None
    step_in_backward.inspected = {}
    _forwards(witness, noise)
    _backwards(witness, noise, backwards)
    _steps(witness)
    _batches(witness)
    if witness.options.resumed:
        _reading(witness, os.path.realpath(witness.options.resumed) + os.sep)


def _reading(witness: Witness, folder: str) -> None:
    """Note which files of an earlier run are opened through Python."""

    def opened(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and witness.active and isinstance(args[0], str) and not str(args[1]).strip("rbt"):
            path = os.path.realpath(args[0])
            if path.startswith(folder):
                witness.files_read.add(path.removeprefix(folder))

    sys.addaudithook(opened)


def _safely(witness: Witness, event: Any, *args: Any) -> Any:
    """Call the witness. Its own failures are noted, and never raised in the script."""
    if not witness.active:
        return None
    try:
        return event(*args)
    except Diverged:
        return None
    except Exception as error:  # the check then has no answer, and says why
        witness.failed = witness.failed or f"{type(error).__name__}: {error}"
        return None


def _forwards(witness: Witness, noise: Any) -> None:
    plain = torch.nn.Module.__call__
    compiling = torch.compiler.is_compiling
    inside = [False]

    @functools.wraps(plain)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if inside[0] or not witness.active or compiling() or is_tracing():
            return plain(self, *args, **kwargs)
        has_parameters = next(self.parameters(), None) is not None
        if has_parameters:
            _safely(witness, _note_model, witness, self)
        inside[0] = True
        try:
            with noise or contextlib.nullcontext():
                output = plain(self, *args, **kwargs)
        finally:
            inside[0] = False
        if has_parameters and not (self.training and torch.is_grad_enabled()):
            _safely(witness, witness.validation, self, output)
        return output

    torch.nn.Module.__call__ = __call__  # type: ignore[method-assign]


def _note_model(witness: Witness, model: torch.nn.Module) -> None:
    if witness.names.meet(model):
        witness.computes_in(next(model.parameters()).dtype)
        for kind in {parameter.device.type for parameter in model.parameters()}:  # several under `host_embeddings`
            if torch.is_autocast_enabled(kind):
                witness.computes_in(torch.get_autocast_dtype(kind))


def _backwards(witness: Witness, noise: Any, notes_losses: bool) -> None:
    plain = torch.autograd.backward

    @functools.wraps(plain)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if notes_losses:
            _safely(witness, witness.backward, tensors)
        with noise or contextlib.nullcontext():
            plain(tensors, *args, **kwargs)
        _safely(witness, witness.after_backward)

    torch.autograd.backward = backward


def _steps(witness: Witness) -> None:
    init = torch.optim.Optimizer.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _safely(witness, witness.names.number, self)

    torch.optim.Optimizer.__init__ = __init__  # type: ignore[method-assign]

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        _safely(witness, witness.before_step, closure is not None)

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        _safely(witness, witness.after_step, optimizer)

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


def _batches(witness: Witness) -> None:
    iterator_class: Any = dataloader._BaseDataLoaderIter
    plain, plain_index, init = iterator_class.__next__, iterator_class._next_index, iterator_class.__init__
    numbers: dict[int, int] = {}

    @functools.wraps(init)
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(loader, "hasten_within", False):  # inner loader of a pass that is itself observed
            init(self, loader, *args, **kwargs)
            return
        self._hasten_name = f"loader {numbers.setdefault(id(loader), len(numbers) + 1)}"
        self._hasten_indices = []
        init(self, loader, *args, **kwargs)

    @functools.wraps(plain_index)
    def _next_index(self: Any) -> Any:
        indices = plain_index(self)
        self._hasten_indices.append(indices)
        return indices

    @functools.wraps(plain)
    def __next__(self: Any) -> Any:
        batch = plain(self)
        if not witness.active:
            return batch
        indices = self._hasten_indices.pop(0) if self._hasten_indices else None
        sample_indices = indices if isinstance(indices, list | tuple | int) else None
        replacement = _safely(witness, witness.batch, self._hasten_name, sample_indices, batch)
        return batch if replacement is None else replacement

    reset = iterator_class._reset

    @functools.wraps(reset)
    def _reset(self: Any, *args: Any, **kwargs: Any) -> None:
        if hasattr(self, "_hasten_indices"):
            self._hasten_indices = []  # indices drawn ahead in a pass that was cut short
        reset(self, *args, **kwargs)

    iterator_class.__init__, iterator_class.__next__ = __init__, __next__
    iterator_class._next_index, iterator_class._reset = _next_index, _reset
