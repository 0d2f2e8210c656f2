"""State from before a step's backward, restored when the step runs out of memory."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import torch

from hasten.data import rng
from hasten.trainer.callbacks.buffers import BufferCopies


class Before:
    """Keeps, and puts back: random states, buffers, gradients gathered so far, states of metrics, counted overflows.

    Not what a step keeps in plain attributes of its own (`self.losses.append(...)`).

    Args:
        module: Whose they are.
        optimizer: Whose parameters get gradients too, where they are not the module's.
        techniques: Those installed; one with `counted` has a state that backwards change.

    Attributes:
        parameters: All that get gradients, each once.
    """

    def __init__(self, module: torch.nn.Module, optimizer: Any, techniques: list[Any]) -> None:
        stepped = [one for group in optimizer.param_groups for one in group["params"]]
        self.parameters = list({id(one): one for one in [*module.parameters(), *stepped]}.values())
        self._buffers = BufferCopies(module)
        self._techniques = [one for one in techniques if hasattr(one, "counted")]
        self._metrics = [part for part in module.modules() if hasattr(part, "_defaults") and hasattr(part, "compute")]
        self._generators = _generators(module)

    def take(self) -> None:
        """Keep the states as they are now. Gradients take memory only within an accumulation."""
        self._random, self._own = rng.state(), rng.states_of(self._generators)
        self._buffers.take()
        self._gradients = [(one, one.grad.clone()) for one in self.parameters if one.grad is not None]
        self._counted = [one.counted() for one in self._techniques]
        self._of_metrics = [_state(metric) for metric in self._metrics]

    def drawn(self) -> bool:
        """Return whether a number was drawn since: of the process's generators, or of those that the module keeps."""
        return not _same(rng.state(), self._random) or not _same(rng.states_of(self._generators), self._own)

    def draw_again(self) -> None:
        """Put the random states back, and nothing else."""
        rng.restore(self._random)
        rng.set_states(self._generators, self._own)

    def put_back(self) -> None:
        """Put all of it back."""
        self.draw_again()
        self._buffers.put_back()
        self.drop_gradients()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient.clone()
        for technique, counted in zip(self._techniques, self._counted, strict=True):
            technique.recount(counted)
        for metric, state in zip(self._metrics, self._of_metrics, strict=True):
            for name, value in state.items():
                object.__setattr__(metric, name, _copy(value))

    def drop_gradients(self) -> list[torch.Tensor | None]:
        """Leave the parameters without gradients, and return those they had."""
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def drop(self) -> None:
        """Let go of copied gradients: the step is done."""
        self._gradients = []


def free_memory() -> None:
    """Give what a try that failed has left to whoever asks next."""
    gc.collect()  # a cycle through the error's frames would keep activations
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _generators(module: torch.nn.Module) -> dict[str, Any]:
    """Return generators that parts of a module keep as attributes."""
    kinds = (torch.Generator, random.Random)
    return {
        f"{path}.{name}": value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, kinds) or type(value).__module__.startswith("numpy.random")
    }


def _state(metric: Any) -> dict[str, Any]:
    """Return a copy of what `update` of a torchmetrics Metric changes."""
    names = (*metric._defaults, "_update_count", "_computed", "_forward_cache")
    return {name: _copy(getattr(metric, name)) for name in names if hasattr(metric, name)}


def _same(one: Any, other: Any) -> bool:
    """Whether two random states are equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def versions(tensors: Iterator[torch.Tensor]) -> list[int]:
    """Return how often each tensor was changed in place."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
