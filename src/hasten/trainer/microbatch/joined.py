"""Logged values and outputs of microbatches, merged into what the whole batch would have given."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from hasten.trainer.logged import LoggedValues
from hasten.trainer.logged_value import value_type

_LOG = inspect.signature(LoggedValues.log)


class Log:
    """Stands in for a board's `log` while a batch is computed: a context. `done` logs each value once, for all parts.

    So a value is exchanged between ranks once, however many parts each of them has, and a try that ran out of memory
    has logged nothing.

    Args:
        board: Where values go.
    """

    def __init__(self, board: LoggedValues) -> None:
        self._board = board
        self._kept: dict[Any, list[tuple[Any, float]]] = {}
        self._how: dict[Any, inspect.BoundArguments] = {}
        self._sizes: dict[Any, list[int | None]] = {}
        self._terms = 1.0
        self._times: Counter[Any] = Counter()

    def __enter__(self) -> Log:
        vars(self._board)["log"] = self.log
        return self

    def __exit__(self, *_: object) -> None:
        vars(self._board).pop("log", None)

    def begin_part(self, terms: float) -> None:
        """Values from now on are of a part whose loss is a mean over so many terms."""
        self._terms = terms
        self._times.clear()

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Keep a value; arguments as for `LoggedValues.log`."""
        bound = _LOG.bind(self._board, *args, **kwargs)
        bound.apply_defaults()
        how = bound.arguments
        name = how["hook"], how["name"], how["add_dataloader_idx"]
        self._times[name] += 1
        key = *name, self._times[name]  # logged twice in one part: twice for the batch
        self._how[key] = bound
        self._sizes.setdefault(key, []).append(how["batch_size"])
        weight = float(how["batch_size"] or self._terms)
        self._kept.setdefault(key, []).append((_own(how["value"], how["enable_graph"]), weight))

    def done(self) -> None:
        """Log what was kept."""
        for key, kept in self._kept.items():
            bound = self._how[key]
            sizes = [size for size in self._sizes[key] if size is not None]
            bound.arguments["value"] = _reduced(kept, bound.arguments["reduce_fx"])
            bound.arguments["batch_size"] = sum(sizes) if len(sizes) == len(kept) else None
            self._board.log(*bound.args[1:], **bound.kwargs)


def _own(value: Any, enable_graph: bool) -> Any:
    """Return a copy of what may change, or hold a graph, until the batch is over; metrics as they are."""
    if isinstance(value, torch.Tensor):
        return value if enable_graph else value.detach().clone()
    return value


def _reduced(kept: list[tuple[Any, float]], reduce_fx: Any) -> Any:
    """Return one value of those of the parts; what is no number (a metric, a mistake) is the board's to judge."""
    name = reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    values = [_scalar(value) for value, _ in kept]
    if len(kept) == 1 or any(value is None for value in values):
        return kept[-1][0]
    device = values[0].device
    together = torch.stack([value.to(device) for value in values])
    if name in ("sum", "min", "max"):
        return getattr(together, name)()
    total = sum(weight for _, weight in kept)
    shares = torch.tensor([weight / total for _, weight in kept], dtype=together.dtype, device=device)
    return (together * shares).sum()


def _scalar(value: Any) -> Any:
    """Return a number as a tensor of no dimension; None for what is none."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            return None
        value = value.reshape(())
        return value if value.is_floating_point() else value.to(value_type())
    return torch.tensor(float(value), dtype=value_type()) if isinstance(value, bool | int | float) else None


def without_graph(output: Any) -> Any:
    """Return what training_step gave without its graph, whose memory the next part needs."""
    if isinstance(output, torch.Tensor):
        return output.detach()
    if isinstance(output, Mapping):
        return {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in output.items()}
    return output


def output_of(outputs: list[Any], sizes: list[int], shares: list[float]) -> Any:
    """Return what training_step would have given for the whole batch.

    Args:
        outputs: What it gave for the parts, without graphs.
        sizes: Samples of the parts.
        shares: How much each part's loss counts; their sum is 1.

    Returns:
        The loss of the whole batch; of a dict, tensors with a row for each sample joined, other floating-point tensors
        of no dimension averaged, and of anything else what the last part gave.
    """
    first = outputs[0]
    if isinstance(first, Mapping):
        return {key: _joined([output[key] for output in outputs if key in output], sizes, shares) for key in first}
    return _joined(outputs, sizes, shares)


def _joined(values: list[Any], sizes: list[int], shares: list[float]) -> Any:
    if len(values) != len(sizes) or not all(isinstance(value, torch.Tensor) for value in values):
        return values[-1]
    if all(value.dim() and len(value) == size for value, size in zip(values, sizes, strict=True)):
        return torch.cat(values)
    if all(value.numel() == 1 and value.is_floating_point() for value in values):
        return torch.stack([value * share for value, share in zip(values, shares, strict=True)]).sum(0)
    return values[-1]
