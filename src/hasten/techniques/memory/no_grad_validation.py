"""Validation without graphs."""

from __future__ import annotations

import weakref
from typing import Any

from hasten import messages
from hasten.evidence import Evidence, Finding, Phase, Severity
from hasten.evidence.figures import percent
from hasten.evidence.weigh import seconds_of
from hasten.plan import Setting
from hasten.techniques.base import Call, Choices, Effect, Refusal, Resource, Technique


class NoGradValidation(Technique):
    """Run forwards of a model in eval mode under `torch.no_grad`.

    Only where no backward was ever seen through an eval-mode forward: a model that is trained with frozen
    BatchNorm, or differentiated for its inputs, is left alone, and so is a forward whose input wants a
    gradient. A model counts as validating once it has been trained in train mode. The Trainer validates so anyway.
    """

    name = "no_grad_validation"
    finds = "validation_graphs"
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

    @classmethod
    def finding(cls, evidence: Evidence) -> Finding | None:
        """Forwards in eval mode that build graphs which no backward uses.

        Rests on counting them. What they cost differs (none for a small MLP, 2.7x for a convolutional net, measured
        here) and is not known here, so it is given no worth (Falcon, tip 3; Lin, tip 12; Kuhn, tip 17).
        """
        if isinstance(cls.settings(evidence), Refusal):
            return None
        models = [model for model in evidence.models if model.eval_calls_with_graph]
        count, all_calls = sum(m.eval_calls_with_graph for m in models), sum(m.eval_calls for m in models)
        if count < max(2, all_calls // 2):
            return None
        phases = [seconds_of(evidence, phase) for phase in Phase]
        share = phases[Phase.VALIDATION] / sum(phases) if sum(phases) > 0 else 0.0
        loader = next((one for one in evidence.loaders if one.role == "validation"), None)
        time = f"; validation takes {percent(share)} of the time" if share >= 0.01 else ""
        return Finding(
            name=cls.finds,
            what=f"{count} of {all_calls} forwards in eval mode kept a graph and its activations, which no backward "
            f"used{time}",
            fix="validate under `with torch.no_grad():` (or @torch.inference_mode())",
            severity=Severity.MEDIUM if share >= 0.05 else Severity.NOTE,
            where=models[0].name,
            details=(f"the validation's loader is built at {loader.where}",) if loader is not None else (),
            technique=cls.name,
            setting="true",
            sources=cls.sources,
        )

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()  # were in train mode once
        self._without: weakref.WeakSet[Any] = weakref.WeakSet()  # had their last forward without a graph
        self._alone: weakref.WeakSet[Any] = weakref.WeakSet()  # are trained in eval mode

    def forward(self, call: Call) -> Call:
        """No graph in eval mode."""
        import torch
        from torch.utils._pytree import tree_iter

        no_grad = torch.no_grad

        def validating(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if module.training:
                self._trained.add(module)
                self._without.discard(module)
                return call(module, args, kwargs)
            if not torch.is_grad_enabled() or module not in self._trained or module in self._alone:
                return call(module, args, kwargs)
            if any(getattr(part, "requires_grad", False) for part in tree_iter((args, kwargs))):
                return call(module, args, kwargs)  # somebody differentiates for the input: a GAN, an attack
            self._without.add(module)
            if not self.acted:
                self.did("model")
            with no_grad():
                return call(module, args, kwargs)

        return validating

    def backward(self, call: Call) -> Call:
        """Leave a model alone from now on when its eval mode turns out to be a part of training."""

        def explained(*args: Any, **kwargs: Any) -> Any:
            if self._without:
                self._look_again()
            try:
                return call(*args, **kwargs)
            except RuntimeError as error:
                if "does not require grad" in str(error):
                    error.add_note(
                        "hasten: if this loss comes from a model in eval mode, take no_grad_validation out of the plan"
                    )
                raise

        return explained

    def _look_again(self) -> None:
        """A backward with no train-mode forward of a model since its last eval-mode one: that one was no validation.

        (After a validation, training goes on with a train-mode forward.) The one gradient that is lost is said.
        """
        for module in list(self._without):
            self._alone.add(module)
            self.refused(f"{type(module).__name__} is trained in eval mode")
            messages.tell(
                f"hasten: no_grad_validation: {type(module).__name__} seems to be trained in eval mode, and missed one "
                "gradient; it is left alone from here on. Take no_grad_validation out of the plan.",
            )
        self._without.clear()
