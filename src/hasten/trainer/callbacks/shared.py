"""Helpers shared by several callbacks: metrics by name, checks for finite values, messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hasten import messages
from hasten.errors import HastenError
from hasten.parallel.flat import by_kind
from hasten.parallel.sharded import local


def say(trainer: Any, message: str) -> None:
    """Print a one-line message, on rank 0 only."""
    if trainer.is_global_zero:
        messages.tell(f"hasten: {message}")


def check_mode(callback: str, mode: str) -> None:
    """Check that `mode` is "min" or "max".

    Raises:
        HastenError: It is something else.
    """
    if mode not in ("min", "max"):
        raise HastenError(
            f"{callback}(mode={mode!r}): there is no such mode", 'use "min" if smaller is better, "max" if larger is'
        )


def missing_metric(callback: str, monitor: str, available: Iterable[str]) -> HastenError:
    """Return the error for a metric that was not logged; it lists the logged ones and suggests the closest."""
    names = sorted(available)
    close = difflib.get_close_matches(monitor, names, n=1)
    logged = f"logged so far: {', '.join(names)}" if names else "nothing was logged so far"
    fix = f"did you mean {close[0]!r}?" if close else f"log it: self.log({monitor!r}, value)"
    return HastenError(f"{callback}(monitor={monitor!r}): there is no such metric ({logged})", fix)


def metric(metrics: Mapping[str, Any], name: str) -> torch.Tensor | None:
    """Return a logged value as a 0-dim tensor on the CPU, or None if it was not logged. Waits for the device."""
    value = metrics.get(name)
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        return torch.tensor(float(value))
    return value.detach().cpu().squeeze()


def nonfinite_weights(module: torch.nn.Module) -> list[str]:
    """Return the names of trained parameters that are not finite; reads the device once per device and dtype.

    Frozen parameters are not checked: a frozen table of attention masks may hold infinities.
    """
    trained = {
        name: local(parameter)
        for name, parameter in module.named_parameters()
        # A meta tensor has no values here: another pipeline stage holds them, in another process.
        if parameter.requires_grad and parameter.layout == torch.strided and not parameter.is_meta
    }
    if all(finite(group) for group in alike(trained.values())):
        return []
    return [name for name, p in trained.items() if not torch.isfinite(p).all()]


def alike(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the dense floating-point tensors, grouped by device and dtype as `torch._foreach` functions need them.

    A sharded tensor is represented by this rank's shard, so ranks must agree on the result themselves.
    """
    dense = (tensor for tensor in map(local, tensors) if tensor.layout == torch.strided and not tensor.is_meta)
    return by_kind(tensor for tensor in dense if tensor.is_floating_point() and tensor.numel())


def non_finite_flag(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return 1.0 if a value of these tensors (one device, one dtype) is NaN or infinite, else 0.0, on their device."""
    worst = torch.stack(
        torch._foreach_norm(tensors, float("inf"))
    )  # the infinity norm; unlike a sum, it cannot overflow
    return (~torch.isfinite(worst).all()).float()


def finite(tensors: list[torch.Tensor]) -> bool:
    """Return whether all values are finite; reads the device once."""
    return not bool(non_finite_flag(tensors))
