"""Validation without graphs."""

from __future__ import annotations

from typing import Any

from hasten.evidence import Evidence
from hasten.techniques.base import Call, Choices, Effect, Refusal, Resource, Technique


class NoGradValidation(Technique):
    """Run forwards of a model in eval mode under `torch.no_grad`.

    Only where no backward was ever seen through an eval-mode forward: a model that is trained with frozen
    BatchNorm, or differentiated for its inputs, is left alone, and so is a forward whose input wants a
    gradient. A model counts as validating once it has been trained in train mode.
    """

    name = "no_grad_validation"
    effect = Effect.EXACT
    relieves = Resource.VALIDATION
    sources = ("Falcon, tip 3", "Lin, tip 12", "Kuhn, tip 17")
    acts_on = "a model in eval mode"

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """On where eval-mode forwards built graphs that nobody used."""
        with_graph = sum(model.eval_calls_with_graph for model in evidence.models)
        if not any(model.eval_calls for model in evidence.models):
            return Refusal("no forward in eval mode was seen")
        if not with_graph:
            return Refusal("validation builds no graphs already")
        if any(model.backward_through_eval for model in evidence.models):
            return Refusal("a backward went through a forward in eval mode: the graph is used")
        if not any(model.train_calls for model in evidence.models):
            return Refusal("the model is never in train mode, so eval mode does not tell validation")
        return Choices((True,), f"{with_graph} forwards in eval mode built graphs that no backward used")

    def forward(self, call: Call) -> Call:
        """No graph in eval mode."""
        import torch

        no_grad = torch.no_grad
        was_trained: set[int] = set()

        def validating(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if module.training:
                was_trained.add(id(module))
                return call(module, args, kwargs)
            if not torch.is_grad_enabled() or id(module) not in was_trained:
                return call(module, args, kwargs)
            if any(getattr(given, "requires_grad", False) for given in (*args, *kwargs.values())):
                return call(module, args, kwargs)  # somebody differentiates for the input: a GAN, an attack
            if not self.acted:
                self.did("model")
            with no_grad():
                return call(module, args, kwargs)

        return validating

    def backward(self, call: Call) -> Call:
        """Say who it was when a graph is missed after all."""

        def explained(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except RuntimeError as error:
                if "does not require grad" in str(error):
                    error.add_note(
                        "hasten: if this loss comes from a model in eval mode, take no_grad_validation out of the plan"
                    )
                raise

        return explained
