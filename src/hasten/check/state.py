"""Name the state of a training: parameters, gradients, buffers, optimizer state, random states."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from hasten.data import rng
from hasten.techniques.memory import step_in_backward

_DIGEST = 12  # bytes
WEIGHT, BEFORE, GRADIENT, BUFFER, STATE = "weight", "weight before the step", "gradient", "buffer", "optimizer state"


class StateNames:
    """Names for the models, parameters and optimizers of a training that are the same in two runs of it.

    A model's name is its class, with a number if there are several of that class, in the order of their first forwards.
    """

    def __init__(self) -> None:
        self.models: dict[str, torch.nn.Module] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self._named: set[int] = set()

    def meet(self, model: torch.nn.Module) -> str:
        """Name a model that is new, and return the name; "" if it has one already."""
        if id(model) in self._named:
            return ""
        self._named.add(id(model))
        kind = type(model).__name__
        of_kind = sum(name.partition("#")[0] == kind for name in self.models)
        name = f"{kind}#{of_kind + 1}" if of_kind else kind
        self.models[name] = model
        return name

    def number(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the optimizer's number; a new optimizer gets the next one."""
        for number, numbered in enumerate(self.optimizers):
            if numbered is optimizer:
                return number
        self.optimizers.append(optimizer)
        return len(self.optimizers) - 1

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return every parameter once: models' parameters by path, others by their position in an optimizer."""
        named: dict[int, tuple[str, torch.Tensor]] = {}
        for model, module in self.models.items():
            for path, parameter in module.named_parameters():
                named.setdefault(id(parameter), (f"{model}.{path}", parameter))
        for number, optimizer in enumerate(self.optimizers):
            optimizer_parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            for index, tensor in enumerate(optimizer_parameters):
                named.setdefault(id(tensor), (f"optimizer {number}, parameter {index}", tensor))
        return dict(named.values())

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return every buffer once, by path."""
        buffers_by_id: dict[int, tuple[str, torch.Tensor]] = {}
        for model, module in self.models.items():
            for path, buffer in module.named_buffers():
                buffers_by_id.setdefault(id(buffer), (f"{model}.{path}", buffer))
        return dict(buffers_by_id.values())


def weights(names: StateNames, label: str = WEIGHT) -> dict[str, torch.Tensor]:
    """Return the parameters as `weight: Net.fc.bias`. With `BEFORE`, as before a step that the backward made."""
    before = (step_in_backward.inspected or {}) if label is BEFORE else {}
    return {
        f"{label}: {name}": before[id(parameter)][0] if id(parameter) in before else parameter.detach()
        for name, parameter in names.parameters().items()
    }


def gradients(names: StateNames) -> dict[str, torch.Tensor]:
    """Return the gradients, including those that a step inside the backward has already used."""
    spent = step_in_backward.inspected or {}
    named = {}
    for name, parameter in names.parameters().items():
        if id(parameter) in spent:
            named[f"{GRADIENT}: {name}"] = spent[id(parameter)][1]
        elif parameter.grad is not None:
            named[f"{GRADIENT}: {name}"] = parameter.grad.detach()
    return named


def buffers(names: StateNames) -> dict[str, torch.Tensor]:
    """Return the buffers of all models."""
    return {f"{BUFFER}: {name}": buffer.detach() for name, buffer in names.buffers().items()}


def optimizer_state(names: StateNames) -> dict[str, torch.Tensor]:
    """Return the optimizers' state of each parameter, numbers as tensors."""
    by_id = {id(parameter): name for name, parameter in names.parameters().items()}
    named: dict[str, torch.Tensor] = {}
    for optimizer in names.optimizers:
        for parameter, parameter_state in optimizer.state.items():
            if not isinstance(parameter_state, dict):
                continue
            name = by_id.get(id(parameter), "?")
            for key, value in parameter_state.items():
                if isinstance(value, torch.Tensor):
                    named[f"{STATE}: {name}, {key}"] = value.detach()
                elif isinstance(value, int | float):
                    named[f"{STATE}: {name}, {key}"] = torch.tensor(float(value), dtype=torch.float64)
    return named


# A technique may choose another kernel: whether it computes the same shows in the tensors, not in these options.
_KERNEL_CHOICES = ("params", "fused", "foreach", "capturable")


def options_of(names: StateNames) -> dict[str, str]:
    """Return the options of each optimizer's groups as text: rates, decay, number of parameters."""
    texts = {}
    for number, optimizer in enumerate(names.optimizers):
        for index, group in enumerate(optimizer.param_groups):
            values = {key: _plain(value) for key, value in group.items() if key not in _KERNEL_CHOICES}
            texts[f"options of optimizer {number}, group {index}"] = repr(
                (sorted(values.items(), key=lambda item: str(item[0])), len(group["params"]))
            )
    return texts


def random_states() -> dict[str, str]:
    """Return digests of the process-wide random states of Python, NumPy and torch."""
    python, numpy, cpu, _ = rng.raw({})
    states = {"Python": python, "torch": cpu, "NumPy": numpy}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for device, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"torch on cuda:{device}"] = state.numpy().tobytes()
    return {
        f"random state of {name}": _short(repr(content).encode())
        for name, content in states.items()
        if content is not None
    }


def digest(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's dtype, shape and bits, whatever its strides."""
    hasher = hashlib.blake2b(digest_size=_DIGEST)
    for chunk in bits(tensor):
        hasher.update(chunk)
    return hasher.hexdigest()


def bits(tensor: torch.Tensor) -> Iterator[bytes | memoryview]:
    """Yield a tensor's dtype, shape and bits in element order, without a copy if it is contiguous on the CPU."""
    tensor = local(tensor)
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        yield from bits(tensor.indices())
        yield from bits(tensor.values())
        return
    yield f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_meta or not tensor.numel():
        return
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    yield plain.reshape(-1).view(torch.uint8).numpy().data


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's local part; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if callable(to_local) else tensor


def cpu_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached copy on the CPU. Sparse tensors stay sparse."""
    tensor = local(tensor).detach()
    if tensor.is_sparse:
        return tensor.coalesce().cpu().clone()
    return tensor.cpu().clone(memory_format=torch.contiguous_format)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _short(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=_DIGEST).hexdigest()
