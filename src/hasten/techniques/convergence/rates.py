"""Rules for scaling the learning rate, and Adam's averages, with the batch size: rules propose, measurements decide."""

from __future__ import annotations

import math
from collections.abc import Iterable

ADAPTIVE = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Lion", "Adafactor")


def is_adaptive(optimizers: Iterable[str]) -> bool:
    """Return whether one of these optimizers, by class name, divides by the size of gradients as Adam does."""
    return any(name.startswith(ADAPTIVE) for name in optimizers)


def rate_factor(times: float, adaptive: bool) -> float:
    """Return the factor on the learning rate for a batch `times` as large.

    It is the square root of `times` for Adam and similar optimizers (Malladi et al. 2022; arXiv 2507.07101), and
    `times` itself for SGD (Goyal et al. 2017).
    """
    return math.sqrt(times) if adaptive else times


def beta2_for(beta2: float, times: float) -> float:
    """Return Adam's beta2 for a batch `times` as large, so that its average covers as many samples.

    It is beta2 to the power of `times` (arXiv 2507.07101).
    """
    return float(beta2**times)
