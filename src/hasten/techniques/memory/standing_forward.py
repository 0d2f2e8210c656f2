"""What stands in a module's `__dict__` as its `forward`, and what TorchScript sees of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hasten.techniques.replaced import Replaced, Replacements


class StandingForward:
    """Stands in a module's `__dict__` as its `forward`, so the module stays the same object with the same names.

    Attributes:
        own: What stood there before: accelerate and peft replace forwards as well. None: the class's.
    """

    own: Any = None

    @property
    def forward(self) -> Callable[..., Any]:
        """The forward in whose place this stands."""
        raise NotImplementedError

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Whose signature it is."""
        return self.forward

    @property
    def __code__(self) -> Any:
        """Whose file and line `torch.export` notes."""
        forward = self.forward
        return getattr(forward, "func", forward).__code__

    def step_aside(self, module: Any) -> None:
        """Leave the module as it was found."""
        if self.own is None:
            vars(module).pop("forward", None)
        else:
            vars(module)["forward"] = self.own


def _functions() -> list[Replaced]:
    import torch

    return [Replaced(torch.jit._recursive, "infer_methods_to_compile", _plain_to_torchscript)]


def _plain_to_torchscript(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let `torch.jit.script(model)` compile the forward in whose place ours stands: it reads source."""

    def infer_methods_to_compile(module: Any) -> Any:
        standing = vars(module).get("forward")
        if not isinstance(standing, StandingForward):
            return plain(module)
        standing.step_aside(module)
        try:
            return plain(module)
        finally:
            vars(module)["forward"] = standing

    return infer_methods_to_compile


TORCHSCRIPT = Replacements(_functions)
"""What lets TorchScript see plain forwards: needed while one stands somewhere."""
