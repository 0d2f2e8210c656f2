"""How closely a plan's gradients and losses agree with the plain run's on the same weights and batches. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_MOST = 1e9  # stands in for infinity, which JSON does not have
_ALL_NOISE, _TURNED = 0.5, 0.1  # of a tensor's norm
Bound = Callable[[str, float, float], float]


@dataclass(frozen=True)
class Agreement:
    """Agreement of the plan's steps with the plain run's, each from the same weights and the same batch.

    After every step the plan's run takes over weights, buffers and optimizer state of the plain run, so differences do
    not accumulate over steps.

    A gradient that noise of the plan's roundoff moves by half of its norm consists of rounding errors (the bias before
    a BatchNorm) and is left out. The cosine also leaves out gradients that noise moves by a tenth, since it turns them.

    Attributes:
        steps: Number of optimizer steps compared.
        loss_gap: Largest relative difference of a step's loss.
        cosine: Smallest cosine between the gradients of one tensor; 1.0 is the same direction.
        cosine_of: Name of that tensor.
        gradient_gap: Norm of the difference over the norm of the plain gradient, for the tensor `worst`.
        worst: Name of the gradient that comes nearest to its bound, or exceeds it most.
        allowed: The gap that rounding explains for that gradient; None without gradients.
    """

    steps: int
    loss_gap: float = 0.0
    cosine: float = 1.0
    cosine_of: str = ""
    gradient_gap: float = 0.0
    worst: str = ""
    allowed: float | None = None


def agreement_of(
    measured: Iterable[Mapping[str, Any]], bound: Bound, noise_share: Callable[[str], float]
) -> Agreement | None:
    """Return how closely the measured steps agree; None if no step was measured.

    Args:
        measured: The witness's moments, each with the result of `measure_difference` for every tensor.
        bound: Returns the largest norm that a difference may have, given a tensor's name, its norm, and the norm of the
            whole tensor.
        noise_share: Returns the share of its norm by which noise moves a tensor.
    """
    steps = [moment["apart"] for moment in measured if moment["kind"] == "step"]
    if not steps:
        return None
    loss_gap, cosine, cosine_of = 0.0, 1.0, ""
    share, gap, worst, allowed = -1.0, 0.0, "", None
    for name, apart, size, along, whole_norm in _tensors(steps):
        if name.startswith("loss"):
            loss_gap = max(loss_gap, _finite(apart / size))
        elif name.startswith("gradient") and noise_share(name) <= _ALL_NOISE:
            if noise_share(name) <= _TURNED and (step_cosine := _cosine(apart / size, along)) < cosine:
                cosine, cosine_of = step_cosine, name
            allowed_norm = bound(name, size, whole_norm)
            if (step_share := _finite(apart / allowed_norm) if allowed_norm > 0 else 0.0) > share:
                share, gap, worst, allowed = step_share, _finite(apart / size), name, _finite(allowed_norm / size)
    return Agreement(len(steps), loss_gap, cosine, _bare(cosine_of), gap, _bare(worst), allowed)


def _tensors(steps: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, float, float, float, float]]:
    """Yield every tensor of every step whose plain norm is not 0, with its measures: a zero tensor has no direction."""
    for step in steps:
        for name, (apart, size, along, whole_norm) in step.items():
            if size > 0:
                yield name, apart, size, along, whole_norm


def _cosine(gap: float, along: float) -> float:
    """Return the cosine between a tensor b and a = b + difference, from |a - b| / |b| and (a - b) b / |b|^2."""
    if not math.isfinite(gap):
        return -1.0
    length = math.sqrt(max(0.0, 1.0 + 2.0 * along + gap * gap))
    return max(-1.0, min(1.0, (1.0 + along) / length)) if length > 0 else -1.0


def _finite(value: float) -> float:
    return min(value, _MOST) if value == value else _MOST


def _bare(name: str) -> str:
    return name.partition(": ")[2]
