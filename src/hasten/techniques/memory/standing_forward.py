"""Stand-ins for a module's `forward`, and how TorchScript and tracers see the plain one behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hasten.techniques.replaced import ReplacedFunction, Replacements


class StandInForward:
    """Stand-in for a module's `forward`, stored in its `__dict__`, so that the module stays the same object.

    Attributes:
        own: The `forward` that was in the `__dict__` before (accelerate and peft put one there); None for the class's.
    """

    own: Any = None

    @property
    def forward(self) -> Callable[..., Any]:
        """The replaced forward."""
        raise NotImplementedError

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The replaced forward, so that `inspect.signature` shows its signature."""
        return self.forward

    @property
    def __code__(self) -> Any:
        """The replaced forward's code, of which `torch.export` records file and line."""
        forward = self.forward
        return getattr(forward, "func", forward).__code__

    def step_aside(self, module: Any) -> None:
        """Restore the module's former forward."""
        if self.own is None:
            vars(module).pop("forward", None)
        else:
            vars(module)["forward"] = self.own


def _functions() -> list[ReplacedFunction]:
    import torch

    return [ReplacedFunction(torch.jit._recursive, "infer_methods_to_compile", _plain_to_torchscript)]


def _plain_to_torchscript(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let `torch.jit.script(model)` compile the replaced forward, since it reads source code."""

    def infer_methods_to_compile(module: Any) -> Any:
        standing = vars(module).get("forward")
        if not isinstance(standing, StandInForward):
            return plain(module)
        standing.step_aside(module)
        try:
            return plain(module)
        finally:
            vars(module)["forward"] = standing

    return infer_methods_to_compile


TORCHSCRIPT = Replacements(_functions)
"""Lets TorchScript see plain forwards; needed while a stand-in is in place anywhere."""
