"""A trial's random seeds: fixed, and shifted by the trial's number so that each trial has seeds of its own."""

from __future__ import annotations

import functools
import random
import sys
from typing import Any

from hasten.taps.after_import import after_import


def fix_seeds(shift: int) -> None:
    """Seed Python and, once imported, NumPy; `fix_torch_seeds` does torch.

    Args:
        shift: 0 leaves the seeds that the script sets itself as they are; another number is added to them.
    """
    random.seed(shift)
    random.seed = _shifted(random.seed, shift)

    def numpy() -> None:
        module: Any = sys.modules["numpy.random"]
        module.seed(shift)
        module.seed = _shifted(module.seed, shift)

    after_import("numpy.random", numpy)


def fix_torch_seeds(shift: int) -> None:
    """Seed torch, and shift the seeds that the script sets."""
    import torch

    torch.manual_seed(shift)
    if shift:
        torch.manual_seed = torch.random.manual_seed = _shifted(torch.manual_seed, shift)
        torch.cuda.manual_seed = _shifted(torch.cuda.manual_seed, shift)
        torch.cuda.manual_seed_all = _shifted(torch.cuda.manual_seed_all, shift)


def _shifted(plain: Any, shift: int) -> Any:
    @functools.wraps(plain)
    def seed(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], int):
            args = ((args[0] + shift) % 2**32, *args[1:])
        elif isinstance(kwargs.get("seed"), int):
            kwargs["seed"] = (kwargs["seed"] + shift) % 2**32
        return plain(*args, **kwargs)

    return seed if shift else plain
