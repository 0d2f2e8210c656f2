"""ModelSummary: the layers and parameters of a model, printed when `fit` begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hasten.trainer.callbacks.base import Callback

_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


@dataclass(frozen=True)
class LayerSummary:
    """A module's name (path within the model), class, and parameter counts, its children's included."""

    name: str
    type: str
    parameters: int
    trainable: int
    training: bool


@dataclass(frozen=True)
class Summary:
    """Layers and parameters of a model; `str` formats it as a table.

    Attributes:
        layers: Its modules, down to the requested depth.
        total_parameters: All parameters; shared ones count once.
        trainable_parameters: Parameters with `requires_grad`.
        model_bytes: Bytes of parameters and buffers.
        lazy: Whether some parameters have no size yet.
    """

    layers: tuple[LayerSummary, ...]
    total_parameters: int
    trainable_parameters: int
    model_bytes: int
    lazy: bool

    def __str__(self) -> str:
        rows = [(r.name, r.type, _short(r.parameters), "train" if r.training else "eval") for r in self.layers]
        table = [("name", "type", "parameters", "mode"), *rows]
        widths = [max(len(row[column]) for row in table) for column in range(4)]
        lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d}" for a, b, c, d in table]
        frozen = self.total_parameters - self.trainable_parameters
        total = f"{_short(self.total_parameters)} parameters"
        total += f" ({_short(self.trainable_parameters)} trained, {_short(frozen)} frozen)" if frozen else ""
        total += f", {self.model_bytes / 1e6:,.1f} MB" + (", and some whose size is not known yet" if self.lazy else "")
        return "\n".join([*(lines if rows else []), f"  {total}"])


def summarize(module: torch.nn.Module, max_depth: int = 1) -> Summary:
    """Return the layers and parameters of a model.

    Args:
        module: The model.
        max_depth: Depth of nested modules to list; 0: only totals; -1: all.
    """
    layers = []
    for name, layer in module.named_modules():
        if name and (max_depth == -1 or name.count(".") < max_depth):
            total, trainable, _ = _count(layer)
            layers.append(LayerSummary(name, type(layer).__name__, total, trainable, layer.training))
    total, trainable, lazy = _count(module)
    tensors: list[Any] = [*module.parameters(), *module.buffers()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors if not is_lazy(tensor))
    return Summary(tuple(layers), total, trainable, size, lazy)


def _count(module: torch.nn.Module) -> tuple[int, int, bool]:
    """Return the number of parameters, of trainable ones, and whether some have no size yet."""
    parameters: list[Any] = list(module.parameters())
    sized = [p for p in parameters if not is_lazy(p)]
    trainable = sum(p.numel() for p in sized if p.requires_grad)
    return sum(p.numel() for p in sized), trainable, len(sized) < len(parameters)


def _short(number: int) -> str:
    """Return a number in few characters, such as "1.5 M"."""
    for unit, letter in _UNITS:
        if number >= unit:
            return f"{number / unit:.1f} {letter}"
    return str(number)


class ModelSummary(Callback):
    """Print a summary of the model once, when `fit` begins.

    Args:
        max_depth: Depth of nested modules to list; 0: print nothing; -1: all.
    """

    def __init__(self, max_depth: int = 1) -> None:
        self.max_depth = max_depth

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Print the summary, on rank 0."""
        if self.max_depth and trainer.is_global_zero:
            trainer.print(summarize(module, self.max_depth))
