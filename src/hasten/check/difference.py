"""How far two tensors are apart."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

_TIMES_ITS_SHARE = 2.0  # of the share by which an element of a gradient differs: its step may differ by so much


def measure_difference(
    plan: torch.Tensor,
    plain: torch.Tensor,
    plan_start: torch.Tensor | None = None,
    plain_start: torch.Tensor | None = None,
    explained: torch.Tensor | None = None,
) -> tuple[float, float, float, float]:
    """Return how far two tensors are apart. With `plain_start`, compare their changes since then.

    Args:
        plan: The tensor under the plan.
        plain: The tensor as it is.
        plan_start: What the change under the plan counts from.
        plain_start: What the change as it is counts from; None to compare the tensors themselves.
        explained: Mask of elements, of the tensors' shape, whose difference does not count.

    Returns:
        The norm of the difference; the norm of the plain side; the relative excess of the plan's side in the plain
        side's direction (-0.1 for 0.9 of a gradient); the norm of the whole plain tensor.
    """
    if plan.shape != plain.shape:
        return float("inf"), 0.0, float("inf"), 0.0
    a, b = _flat_float64(plan), _flat_float64(plain)
    whole_norm = norm = float(b.norm())
    if not math.isfinite(whole_norm):
        whole_norm = float(torch.nan_to_num(b, 0.0, 0.0, 0.0).norm())
    if plain_start is not None and plan_start is not None:
        a, b = a - _flat_float64(plan_start), b - _flat_float64(plain_start)
        norm = float(b.norm())
    difference = a - b
    if explained is not None:
        difference.masked_fill_(explained.reshape(-1), 0.0)
    difference_norm = float(difference.norm())
    if not math.isfinite(difference_norm + norm):  # an element is not finite, or its square overflows
        finite = torch.isfinite(b)
        if not torch.equal(torch.isfinite(a), finite):
            return float("inf"), whole_norm, float("inf"), whole_norm
        b, difference = b[finite], difference[finite]
        difference_norm, norm = float(difference.norm()), float(b.norm())
    along = float(difference @ b) / norm**2 if norm > 0 else 0.0
    return difference_norm, norm, along, whole_norm


class WeightStep(NamedTuple):
    """A weight's gradient, and the weight before and after the optimizer's step: three tensors of one shape."""

    gradient: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor


def explained_by_gradient(plan: WeightStep, plain: WeightStep, only_turned: bool = False) -> torch.Tensor:
    """Return a flat mask of the elements of a weight whose steps differ, as a share, no more than their gradients do.

    Args:
        plan: The step under the plan.
        plain: The step as it is, of the same shape.
        only_turned: Only the elements whose gradients differ in sign.
    """
    gradient, plain_gradient = _flat_float64(plan.gradient), _flat_float64(plain.gradient)
    turned = gradient.sign() != plain_gradient.sign()
    if only_turned or not len(gradient):
        return turned
    step, plain_step = (_flat_float64(side.after) - _flat_float64(side.before) for side in (plan, plain))
    # A step that momentum has almost cancelled is held to the usual size of this weight's steps.
    size = plain_step.abs().clamp_min(float(plain_step.square().mean().sqrt()))
    share = (gradient - plain_gradient).abs() / plain_gradient.abs()
    return turned | ((step - plain_step).abs() <= _TIMES_ITS_SHARE * share * size)


def _flat_float64(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(torch.float64).reshape(-1)


def difference_in_words(apart: tuple[float, float, float, float]) -> str:
    difference, size, _, _ = apart
    if size > 0:
        return f"differs by {difference / size:.2g} of its size"
    return f"differs by {difference:.2g}"
