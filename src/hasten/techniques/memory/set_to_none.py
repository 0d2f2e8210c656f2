"""Gradients dropped instead of filled with zeros."""

from __future__ import annotations

import inspect
import types
from typing import Any

from hasten.evidence import Evidence
from hasten.techniques.base import Choices, Effect, Refusal, Resource, Technique


class SetToNone(Technique):
    """`zero_grad(set_to_none=False)` sets gradients to None all the same.

    Saves a write of zeros and a read-add per parameter. The numbers stay the same as long as every parameter gets
    a gradient in every step, which is what the evidence must show. The Trainer clears gradients so anyway; a
    module's own `optimizer_zero_grad` is reached too.
    """

    name = "set_to_none"
    effect = Effect.EXACT
    relieves = Resource.OPTIMIZER
    sources = ("Lin, tip 14", "Kuhn, tip 10")
    acts_on = "an optimizer that is told to fill gradients with zeros"

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """On where the script asks for zeros."""
        if not evidence.flags.zeroed_gradients:
            return Refusal("gradients are set to None already, torch's default")
        if evidence.flags.missing_gradients:
            return Refusal("some parameters got no gradient in some step: zeros and None differ for them")
        return Choices((True,), f"gradients are filled with zeros at {evidence.flags.zeroed_gradients}")

    def process(self) -> None:
        """Let `Module.zero_grad` drop gradients too."""
        import torch

        zero_grad = torch.nn.Module.zero_grad

        def to_none(module: Any, set_to_none: bool = True) -> None:
            zero_grad(module, True)

        torch.nn.Module.zero_grad = to_none  # type: ignore[assignment, method-assign]

    def optimizer(self, optimizer: Any) -> None:
        """Drop this optimizer's gradients."""
        zero_grad = type(optimizer).zero_grad
        if "set_to_none" not in inspect.signature(zero_grad).parameters:
            self.refused(f"{type(optimizer).__name__} clears gradients in its own way")
            return

        def to_none(self: Any, set_to_none: bool = True) -> None:
            zero_grad(self, set_to_none=True)

        optimizer.zero_grad = types.MethodType(to_none, optimizer)
        self.did("optimizer")
