"""How a learning rate, and Adam's averages, go with the size of a batch: rules propose, measurements decide."""

from __future__ import annotations

import math
from collections.abc import Iterable

ADAPTIVE = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Lion", "Adafactor")


def is_adaptive(optimizers: Iterable[str]) -> bool:
    """Whether one of these optimizers, by the names of their classes, divides by the size of gradients as Adam does."""
    return any(name.startswith(ADAPTIVE) for name in optimizers)


def rate_factor(times: float, adaptive: bool) -> float:
    """Return what the rate is multiplied by for a batch so many times as large.

    The square root for Adam and its like (Malladi et al. 2022; arXiv 2507.07101), in proportion for SGD (Goyal et al.
    2017).
    """
    return math.sqrt(times) if adaptive else times


def beta2_for(beta2: float, times: float) -> float:
    """Return Adam's beta2 for a batch so many times as large: its memory stays as long, counted in samples.

    arXiv 2507.07101: beta2 to the power of `times`.
    """
    return float(beta2**times)
