"""Precision: in which number formats a module lies and computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """In which formats parameters lie, and a forward computes.

    Attributes:
        name: As the flag `precision` has it.
        parameters: The format that modules made under `Trainer.init_module` have; None: torch's default.
        compute: The format of the forward where that is another; None: that of the parameters.
    """

    name: str = "32-true"
    parameters: torch.dtype | None = None
    compute: torch.dtype | None = None


_FORMATS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "32-true": (None, None),
    "bf16-mixed": (None, torch.bfloat16),
    "16-mixed": (None, torch.float16),
    "bf16-true": (torch.bfloat16, torch.bfloat16),
    "16-true": (torch.float16, torch.float16),
    "64-true": (torch.float64, torch.float64),
}
"""Of parameters and of the forward."""

PRECISIONS = {
    **{name: name for name in _FORMATS},
    "32": "32-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    "64": "64-true",
}
"""Names of precisions, short ones too, and what each is in full."""


def precision_named(name: str) -> Precision:
    """Return the precision of this full name."""
    return Precision(name, *_FORMATS[name])
