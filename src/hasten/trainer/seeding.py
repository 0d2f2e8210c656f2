"""Seeds for the generators that trainings draw from."""

from __future__ import annotations

import random
from typing import Any

import torch

from hasten.errors import HastenError


def seed_everything(seed: int, workers: bool = True) -> int:
    """Seed Python, NumPy and torch.

    Args:
        seed: From 0 to 2**32 - 1.
        workers: Kept for those who pass it: workers get seeds of their own from torch in any case.

    Returns:
        The seed.
    """
    import numpy

    given: Any = seed
    if not isinstance(given, int | numpy.integer) or not 0 <= given < 2**32:
        raise HastenError(f"seed={seed!r} must be a whole number from 0 to {2**32 - 1}")
    seed = int(given)
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002  # what scripts draw from
    torch.manual_seed(seed)
    return seed
