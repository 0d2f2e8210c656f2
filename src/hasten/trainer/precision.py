"""Precision: in which number formats a module lies and computes."""

from __future__ import annotations

import torch


class Precision:
    """Parameters and computation in float32: nothing is changed.

    Attributes:
        name: As the flag `precision` has it.
        parameters: The format that modules made under `Trainer.init_module` have; None: torch's default.
        compute: The format of the forward where that is another; None: that of the parameters.
    """

    parameters: torch.dtype | None = None
    compute: torch.dtype | None = None

    def __init__(self, name: str = "32-true") -> None:
        self.name = name


class Mixed(Precision):
    """Parameters in float32, the forward in a smaller format."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.compute = torch.bfloat16 if name.startswith("bf16") else torch.float16


class Whole(Precision):
    """Parameters and computation in one other format."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        formats = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
        self.parameters = self.compute = formats[name]


_KINDS: dict[str, type[Precision]] = {
    "32-true": Precision,
    **dict.fromkeys(("bf16-mixed", "16-mixed"), Mixed),
    **dict.fromkeys(("bf16-true", "16-true", "64-true"), Whole),
}

PRECISIONS = {
    **{name: name for name in _KINDS},
    "32": "32-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    "64": "64-true",
}
"""Names of precisions, short ones too, and what each is in full."""


def precision_named(name: str) -> Precision:
    """Return the precision of this full name."""
    return _KINDS[name](name)
