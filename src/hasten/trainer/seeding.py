"""Seeds the random generators that trainings use."""

from __future__ import annotations

import random
from typing import Any

import torch

from hasten.errors import HastenError


def seed_everything(seed: int, workers: bool = True) -> int:
    """Seed Python, NumPy and torch.

    Args:
        seed: From 0 to 2**32 - 1.
        workers: Accepted for compatibility, and ignored: torch seeds each DataLoader worker in any case.

    Returns:
        The seed.
    """
    import numpy

    value: Any = seed
    if not isinstance(value, int | numpy.integer) or not 0 <= value < 2**32:
        raise HastenError(f"seed={seed!r} must be a whole number from 0 to {2**32 - 1}")
    seed = int(value)
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002  # what scripts draw from
    torch.manual_seed(seed)
    return seed
