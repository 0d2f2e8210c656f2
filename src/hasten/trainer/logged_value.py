"""One value of `self.log`: its last value and its reduction over the epoch, on the device until somebody reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

Reduce = Callable[..., torch.Tensor]

_FOLD_AT = 256  # number of pending values at which they are folded into the sum


def value_type() -> torch.dtype:
    """Return the dtype in which a logged number is stored: torch's default, or float32 if that is a narrow type."""
    default = torch.get_default_dtype()
    return default if default in (torch.float32, torch.float64) else torch.float32


@dataclass(slots=True, eq=False)
class Entry:
    """One logged name, in one hook and for one loader.

    Attributes:
        how: Arguments of `self.log`, to refuse a second call with others.
        on_step: Whether the value is logged per step.
        on_epoch: Whether the value is logged per epoch.
        suffix: The loader's suffix of the name, with several loaders.
        graph: Whether the autograd graph is kept.
        reduce: Reduction over the epoch: "mean", "sum", "min" or "max".
        metric: The torchmetrics Metric, if one is logged.
        sync: Reduces a value over processes; None where it is not.
        valid: Whether it was logged since the last reset.
        last: The last step's value.
        dtype: Dtype of the epoch's value; a wider logged value widens it.
        total: The reduction over the folded values so far.
        count: Their total weight, for the mean.
    """

    hook: str
    name: str
    how: tuple[Any, ...]
    on_step: bool
    on_epoch: bool
    suffix: str = ""
    dataloader_idx: int | None = None
    prog_bar: bool = False
    logger: bool = True
    graph: bool = False
    reduce: str = "mean"
    metric: Any = None
    sync: Reduce | None = None
    valid: bool = False
    last: Any = None
    dtype: torch.dtype = field(default_factory=value_type)
    total: Any = None
    count: float = 0.0
    _pending: list[Any] = field(default_factory=list)
    _weights: list[float] = field(default_factory=list)
    _computed: Any = None

    @property
    def forked(self) -> bool:
        """Whether it is logged per step and per epoch, under two names."""
        return self.on_step and self.on_epoch

    def add(self, value: Any, weight: float) -> None:
        """Add a value to the epoch's reduction, weighted by its number of samples."""
        self._computed = None
        self._pending.append(value)
        self._weights.append(weight)
        if len(self._pending) >= _FOLD_AT:
            self.fold()

    def fold(self) -> None:
        """Fold the pending values into the total, in one operation on the device instead of one per step."""
        if not self._pending:
            return
        values = [v if isinstance(v, torch.Tensor) else torch.tensor(float(v)) for v in self._pending]
        device = next((v.device for v in values if v.device.type != "cpu"), values[0].device)
        stacked = torch.stack([v.to(device) for v in values])
        self.dtype = torch.promote_types(self.dtype, stacked.dtype)
        if self.reduce == "mean":
            stacked = stacked * torch.tensor(self._weights, dtype=stacked.dtype, device=device)
            self.count += sum(self._weights)
        if self.reduce in ("min", "max"):
            folded = getattr(stacked, self.reduce)()
            smaller_or_larger = getattr(torch, f"{self.reduce}imum")
            self.total = folded if self.total is None else smaller_or_larger(self.total, folded)
        elif device.type == "cpu" and not self.graph:
            # Summed one after the other in their own precision, as other Trainers do, for bit-identical values.
            before = [] if self.total is None else [self.total.to(stacked.dtype).reshape(1).numpy()]
            self.total = torch.from_numpy(numpy.add.accumulate(numpy.concatenate([*before, stacked.numpy()])))[-1]
        else:
            if not self.graph and device.type != "mps":  # float64, so a long epoch loses no precision; MPS has none
                stacked = stacked.double()
            folded = stacked.sum()
            self.total = folded if self.total is None else self.total + folded
        self._pending, self._weights = [], []

    def epoch_value(self) -> Any:
        """Return the value reduced over the epoch; None if nothing was logged."""
        if self.metric is not None:
            return self.metric.compute()
        if self._computed is None:
            self.fold()
            if self.total is None:
                return None
            total, count = self.total, self.count
            if self.sync is not None:
                op = "sum" if self.reduce == "mean" else self.reduce
                total = self.sync(total.clone(), reduce_op=op)
                count = float(self.sync(torch.tensor(count, device=total.device), reduce_op="sum"))
            if self.reduce == "mean":
                total = total / count
            self._computed = total.to(self.dtype)
        return self._computed

    def reset(self) -> None:
        """Clear the values of the epoch."""
        self.valid = False
        self._pending, self._weights = [], []
        self.total = self._computed = None
        self.count = 0.0
        if self.metric is not None:
            self.metric.reset()
