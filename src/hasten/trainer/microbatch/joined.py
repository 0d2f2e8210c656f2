"""Merge the logged values and outputs of the parts into those of the whole batch."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from hasten.trainer.logged import LoggedValues
from hasten.trainer.logged_value import value_type

_LOG = inspect.signature(LoggedValues.log)


class JoinedLog:
    """A context replacing a board's `log` while a batch is computed; `log_merged` logs each value once, for all parts.

    So a value is reduced over ranks once, however many parts each rank has, and an attempt that ran out of memory logs
    nothing.

    Args:
        board: Where the values are logged.
    """

    def __init__(self, board: LoggedValues) -> None:
        self._board = board
        self._values: dict[Any, list[tuple[Any, float]]] = {}
        self._calls: dict[Any, inspect.BoundArguments] = {}
        self._sizes: dict[Any, list[int | None]] = {}
        self._terms = 1.0
        self._times: Counter[Any] = Counter()

    def __enter__(self) -> JoinedLog:
        vars(self._board)["log"] = self.log
        return self

    def __exit__(self, *_: object) -> None:
        vars(self._board).pop("log", None)

    def begin_part(self, terms: float) -> None:
        """Begin a part whose loss counts this much: the weight of values logged without a batch size."""
        self._terms = terms
        self._times.clear()

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Keep a value; arguments as for `LoggedValues.log`."""
        bound = _LOG.bind(self._board, *args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        name = arguments["hook"], arguments["name"], arguments["add_dataloader_idx"]
        self._times[name] += 1
        key = *name, self._times[name]  # logged twice in one part: twice for the batch
        self._calls[key] = bound
        self._sizes.setdefault(key, []).append(arguments["batch_size"])
        weight = float(arguments["batch_size"] or self._terms)
        self._values.setdefault(key, []).append((_detached(arguments["value"], arguments["enable_graph"]), weight))

    def log_merged(self) -> None:
        """Log the merged values."""
        for key, parts in self._values.items():
            bound = self._calls[key]
            sizes = [size for size in self._sizes[key] if size is not None]
            bound.arguments["value"] = _reduced(parts, bound.arguments["reduce_fx"])
            bound.arguments["batch_size"] = sum(sizes) if len(sizes) == len(parts) else None
            self._board.log(*bound.args[1:], **bound.kwargs)


def _detached(value: Any, enable_graph: bool) -> Any:
    """Return a copy of a tensor without its graph, unless a graph is asked for; other values (metrics) as they are.

    The tensor may change before the batch is done.
    """
    if isinstance(value, torch.Tensor):
        return value if enable_graph else value.detach().clone()
    return value


def _reduced(parts: list[tuple[Any, float]], reduce_fx: Any) -> Any:
    """Return the value for the whole batch from those of its parts.

    Of values that are not numbers (a metric, a mistake), return the last: the board handles or refuses it.
    """
    name = reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    values = [_scalar(value) for value, _ in parts]
    if len(parts) == 1 or any(value is None for value in values):
        return parts[-1][0]
    device = values[0].device
    together = torch.stack([value.to(device) for value in values])
    if name in ("sum", "min", "max"):
        return getattr(together, name)()
    total = sum(weight for _, weight in parts)
    shares = torch.tensor([weight / total for _, weight in parts], dtype=together.dtype, device=device)
    return (together * shares).sum()


def _scalar(value: Any) -> Any:
    """Return a number as a 0-dim floating-point tensor; None for other values."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            return None
        value = value.reshape(())
        return value if value.is_floating_point() else value.to(value_type())
    return torch.tensor(float(value), dtype=value_type()) if isinstance(value, bool | int | float) else None


def without_graph(output: Any) -> Any:
    """Return the output of training_step without its graph, whose memory the next part needs."""
    if isinstance(output, torch.Tensor):
        return output.detach()
    if isinstance(output, Mapping):
        return {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in output.items()}
    return output


def output_of(outputs: list[Any], sizes: list[int], shares: list[float]) -> Any:
    """Return what training_step would have returned for the whole batch.

    Args:
        outputs: Its outputs for the parts, without graphs.
        sizes: Samples of the parts.
        shares: Weight of each part's loss; they add up to 1.

    Returns:
        The loss of the whole batch. Of a dict: tensors with a row per sample are concatenated, floating-point tensors
        with a single element are averaged, and other values are those of the last part.
    """
    first = outputs[0]
    if isinstance(first, Mapping):
        return {key: _joined([output[key] for output in outputs if key in output], sizes, shares) for key in first}
    return _joined(outputs, sizes, shares)


def _joined(values: list[Any], sizes: list[int], shares: list[float]) -> Any:
    """Merge one value of all parts' outputs."""
    if len(values) != len(sizes) or not all(isinstance(value, torch.Tensor) for value in values):
        return values[-1]
    if all(value.dim() and len(value) == size for value, size in zip(values, sizes, strict=True)):
        return torch.cat(values)
    if all(value.numel() == 1 and value.is_floating_point() for value in values):
        return torch.stack([value * share for value, share in zip(values, shares, strict=True)]).sum(0)
    return values[-1]
