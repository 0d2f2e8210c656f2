"""How far two tensors are apart."""

from __future__ import annotations

import math

import torch


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
