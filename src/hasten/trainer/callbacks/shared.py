"""Helpers of several callbacks: metrics by name, finite weights, a line to the person."""

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
    """One line to the person, from rank 0."""
    if trainer.is_global_zero:
        messages.tell(f"hasten: {message}")


def check_mode(who: str, mode: str) -> None:
    """`mode` must be min or max.

    Raises:
        HastenError: It is something else.
    """
    if mode not in ("min", "max"):
        raise HastenError(
            f"{who}(mode={mode!r}): there is no such mode", 'use "min" if smaller is better, "max" if larger is'
        )


def missing_metric(who: str, monitor: str, available: Iterable[str]) -> HastenError:
    """The error that names a metric nobody logged, those there are, and the likely one."""
    names = sorted(available)
    close = difflib.get_close_matches(monitor, names, n=1)
    found = f"logged so far: {', '.join(names)}" if names else "nothing was logged so far"
    fix = f"did you mean {close[0]!r}?" if close else f"log it: self.log({monitor!r}, value)"
    return HastenError(f"{who}(monitor={monitor!r}): there is no such metric ({found})", fix)


def metric(metrics: Mapping[str, Any], name: str) -> torch.Tensor | None:
    """A logged value as a 0-dim tensor on the CPU (this waits for the device), or None where there is none."""
    value = metrics.get(name)
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        return torch.tensor(float(value))
    return value.detach().cpu().squeeze()


def nonfinite_weights(module: torch.nn.Module) -> list[str]:
    """Return the names of trained parameters that are not finite; one read of the device for each kind of tensor.

    Only parameters that are trained are asked: a frozen table of attention masks may well hold infinities.
    """
    trained = {
        name: local(parameter)
        for name, parameter in module.named_parameters()
        # Without memory here: another process has it, a stage of a pipeline.
        if parameter.requires_grad and parameter.layout == torch.strided and not parameter.is_meta
    }
    if all(finite(group) for group in alike(trained.values())):
        return []
    return [name for name, p in trained.items() if not torch.isfinite(p).all()]


def alike(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Dense floating-point tensors grouped by device and dtype, as `torch._foreach` functions want them.

    Of a sharded one this rank's part: ranks agree on what they find.
    """
    dense = (one for one in map(local, tensors) if one.layout == torch.strided and not one.is_meta)
    return by_kind(one for one in dense if one.is_floating_point() and one.numel())


def non_finite_flag(tensors: list[torch.Tensor]) -> torch.Tensor:
    """1.0 if any value of these tensors (one device, one dtype) is NaN or infinite, else 0.0; stays on the device."""
    worst = torch.stack(torch._foreach_norm(tensors, float("inf")))  # the largest absolute value cannot overflow
    return (~torch.isfinite(worst).all()).float()


def finite(tensors: list[torch.Tensor]) -> bool:
    """Whether all values are finite; reads the device once."""
    return not bool(non_finite_flag(tensors))
