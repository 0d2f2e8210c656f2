"""Fix a trial's random seeds, and shift the seeds that the script sets, so that trials can differ in their seeds."""

from __future__ import annotations

import functools
import random
import sys
from typing import Any

from hasten.taps.after_import import after_import


def fix_seeds(shift: int) -> None:
    """Seed Python's generator and, once imported, NumPy's; `fix_torch_seeds` seeds torch's.

    Args:
        shift: The seed. It is also added to the seeds that the script sets; 0 leaves them unchanged.
    """
    random.seed(shift)
    random.seed = _shifted(random.seed, shift)

    def numpy() -> None:
        module: Any = sys.modules["numpy.random"]
        module.seed(shift)
        module.seed = _shifted(module.seed, shift)

    after_import("numpy.random", numpy)


def fix_torch_seeds(shift: int) -> None:
    """Seed torch, and shift the seeds that the script sets by `shift`."""
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
