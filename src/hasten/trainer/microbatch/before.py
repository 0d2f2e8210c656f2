"""State from before a step's forward and backward, restored when the step is repeated."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import torch

from hasten.data import rng
from hasten.trainer.callbacks.buffers import BufferCopies


class StepSnapshot:
    """Saves and restores random states, buffers, accumulated gradients, metric states and counted overflows.

    Not included: plain attributes that a step changes (`self.losses.append(...)`).

    Args:
        module: The trained module.
        optimizer: Its optimizer, which may hold parameters that are not the module's.
        techniques: The installed techniques; one with a method `counted` has state that a backward changes.

    Attributes:
        parameters: All parameters that get gradients, each once.
    """

    def __init__(self, module: torch.nn.Module, optimizer: Any, techniques: list[Any]) -> None:
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.parameters = list({id(parameter): parameter for parameter in [*module.parameters(), *stepped]}.values())
        self._buffers = BufferCopies(module)
        self._techniques = [technique for technique in techniques if hasattr(technique, "counted")]
        self._metrics = [part for part in module.modules() if hasattr(part, "_defaults") and hasattr(part, "compute")]
        self._generators = _generators(module)

    def take(self) -> None:
        """Save the current state. Gradients take memory only within an accumulation."""
        self._random, self._module_rng = rng.state(), rng.states_of(self._generators)
        self._buffers.take()
        self._gradients = [
            (parameter, parameter.grad.clone()) for parameter in self.parameters if parameter.grad is not None
        ]
        self._counted = [technique.counted() for technique in self._techniques]
        self._of_metrics = [_state(metric) for metric in self._metrics]

    def drawn(self) -> bool:
        """Return whether a random number was drawn since `take`, from the process's or the module's generators."""
        return not _same(rng.state(), self._random) or not _same(rng.states_of(self._generators), self._module_rng)

    def draw_again(self) -> None:
        """Restore the random states only."""
        rng.restore(self._random)
        rng.set_states(self._generators, self._module_rng)

    def put_back(self) -> None:
        """Restore everything."""
        self.draw_again()
        self._buffers.put_back()
        self.drop_gradients()
        for parameter, gradient in self._gradients:
            # A clone, since the next attempt may fail too and this copy is needed again.
            parameter.grad = gradient.clone()
        for technique, counted in zip(self._techniques, self._counted, strict=True):
            technique.recount(counted)
        for metric, state in zip(self._metrics, self._of_metrics, strict=True):
            for name, value in state.items():
                object.__setattr__(metric, name, _copy(value))

    def drop_gradients(self) -> list[torch.Tensor | None]:
        """Remove the gradients of the parameters, and return them."""
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def drop(self) -> None:
        """Free the copied gradients: the step is done."""
        self._gradients = []


def free_memory() -> None:
    """Free the memory that a failed attempt left: in reference cycles and in the CUDA cache."""
    gc.collect()  # the error's frames may form a cycle that keeps activations alive
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _generators(module: torch.nn.Module) -> dict[str, Any]:
    """Return the random generators in the attributes of a module and its submodules."""
    kinds = (torch.Generator, random.Random)
    return {
        f"{path}.{name}": value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, kinds) or type(value).__module__.startswith("numpy.random")
    }


def _state(metric: Any) -> dict[str, Any]:
    """Return a copy of the state that a torchmetrics Metric's `update` changes."""
    names = (*metric._defaults, "_update_count", "_computed", "_forward_cache")
    return {name: _copy(getattr(metric, name)) for name in names if hasattr(metric, name)}


def _same(first: Any, second: Any) -> bool:
    """Return whether two random states are equal."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)


def _copy(value: Any) -> Any:
    """Return a copy of a value of a metric."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def versions(tensors: Iterator[torch.Tensor]) -> list[int]:
    """Return the version of each tensor: how many times it was changed in place."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
