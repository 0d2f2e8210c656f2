"""Gradients dropped instead of filled with zeros."""

from __future__ import annotations

import inspect
import types
from typing import Any

from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.waiting import in_ms, per_step
from hasten.evidence.weigh import on_gpu, share_of, timed
from hasten.techniques.base import Choices, Effect, Refusal, Resource, Technique

_BYTES, _GPU_BYTES = 10e9, 2e12  # of memory moved a second


class SetToNone(Technique):
    """`zero_grad(set_to_none=False)` sets gradients to None all the same.

    Saves a write of zeros and a read-add per parameter. The numbers stay the same as long as every parameter gets
    a gradient in every step, which is what the evidence must show. The Trainer clears gradients so anyway; a
    module's own `optimizer_zero_grad` is reached too.
    """

    name = "set_to_none"
    finds = "zeroed_gradients"
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

    @classmethod
    def finding(cls, evidence: Evidence) -> Finding | None:
        """Gradients that are filled with zeros.

        Rests on the measured time of `zero_grad(set_to_none=False)` and, where that was not taken, on the gradients'
        size: a write of zeros, and a read and add in backward (Lin, tip 14; Kuhn, tip 10).
        """
        events = evidence.events_of("zero_grad")
        if evidence.flags.missing_gradients or not events:
            return None
        moved = 3 * 4 * max((model.trained_parameters for model in evidence.models), default=0)
        measured = per_step(evidence, events)
        times = min(1.0, max(event.steps for event in events) / evidence.steps) if evidence.steps else 0.0
        seconds = measured or times * moved / (_GPU_BYTES if on_gpu(evidence) else _BYTES)
        return timed(
            cls.finds,
            f"gradients of {moved / 12 / 1e6:.1f} M parameters are filled with zeros instead of dropped, "
            f"{'' if measured else 'about '}{in_ms(seconds)} a step",
            "call `optimizer.zero_grad()` without set_to_none=False",
            share_of(evidence, seconds),
            HowKnown.MEASURED if measured else HowKnown.ESTIMATED,
            place=events[0].where or evidence.flags.zeroed_gradients,
            details=("the result stays the same as long as every parameter gets a gradient in every step",),
            technique=cls.name,
            setting="true",
            sources=cls.sources,
        )

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
