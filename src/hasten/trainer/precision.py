"""Precision: the dtypes of a module's parameters and of its computation."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """The dtypes of parameters and of the forward.

    Attributes:
        name: The value of the flag `precision`.
        parameters: Dtype of modules made under `Trainer.init_module`; None: torch's default.
        compute: Dtype of the forward, if it differs; None: that of the parameters.
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
"""Name -> dtypes of the parameters and of the forward."""

PRECISIONS = {
    **{name: name for name in _FORMATS},
    "32": "32-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    "64": "64-true",
}
"""Accepted names of precisions, including short names -> full name."""


def precision_named(name: str) -> Precision:
    """Return the precision with this full name."""
    return Precision(name, *_FORMATS[name])
