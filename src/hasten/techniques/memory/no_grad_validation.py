"""The technique `no_grad_validation`: forwards in eval mode without activations, for scripts that forgot `no_grad`."""

from __future__ import annotations

import weakref
from typing import Any

from hasten.evidence import Evidence
from hasten.plan import Setting
from hasten.techniques.base import Call, Choices, Effect, Liveness, Refusal, Resource, Technique

_TRACKING = 75e-6  # seconds per layer that recording what a repetition needs takes, on a CPU
_AT_MOST = 0.1  # largest share of a validation batch's time that the recording may take
_KEEPS = 2  # number of first eval-mode forwards that keep all activations until their end


class NoGradValidation(Technique):
    """Keep no activations in a model's eval-mode forwards: graphs are still built, but without their memory.

    A graph without activations looks the same to the script, and the same kernels run. If a backward goes through one
    after all (consistency training, adversarial examples, EWC), the forward is repeated exactly and the gradient is the
    same to the bit; the model is left alone from then on. If that is impossible because a weight has changed in
    between, the backward ends in an error. Forwards whose input requires a gradient are left alone too. A model counts
    as validating once it has been trained in train mode. The Trainer validates without graphs anyway.
    """

    name = "no_grad_validation"
    effect = Effect.EXACT
    relieves = Resource.VALIDATION
    sources = ("Falcon, tip 3", "Lin, tip 12", "Kuhn, tip 17")
    acts_on = "a model in eval mode"
    liveness = Liveness.STEP  # it acts in `forward` only; graphs made before a switch stay valid

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose it if eval-mode forwards built graphs that nobody used, and take long compared with its overhead."""
        if isinstance(count := unused_graphs(evidence), Refusal):
            return count
        layers = max(sum(model.layers.values()) for model in evidence.models if model.eval_calls_with_graph)
        seconds = _seconds_of_validation(evidence)
        if 0 < seconds < layers * _TRACKING / _AT_MOST:
            return Refusal(
                f"a batch of validation takes {seconds * 1e3:.1f} ms: noting what a graph without activations needs "
                f"would take longer than a graph does; write `with torch.no_grad():` around it"
            )
        return Choices((True,), f"{count} forwards in eval mode built graphs that no backward used")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()  # models that ran in train mode once
        self._alone: weakref.WeakSet[Any] = weakref.WeakSet()  # models that are left alone

    def forward(self, call: Call) -> Call:
        """Drop the activations of eval-mode forwards."""
        import torch
        from torch.compiler import is_compiling
        from torch.utils._pytree import tree_iter

        from hasten.techniques.recompute.forward import Repeatable

        known: weakref.WeakKeyDictionary[Any, Repeatable] = weakref.WeakKeyDictionary()
        grad_enabled = torch.is_grad_enabled

        def validating(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if module.training:
                self._trained.add(module)
                return call(module, args, kwargs)
            if not grad_enabled() or module not in self._trained or module in self._alone or is_compiling():
                return call(module, args, kwargs)
            if any(getattr(part, "requires_grad", False) for part in tree_iter((args, kwargs))):
                return call(module, args, kwargs)  # differentiated with respect to the input: a GAN, an attack
            repeatable = known.get(module)
            if repeatable is None:
                repeatable = known[module] = self._repeatable(module)
            return repeatable.run(module, lambda *args, **kwargs: call(module, args, kwargs), args, kwargs)

        return validating

    def _repeatable(self, module: Any) -> Any:
        """Return the `Repeatable` of a model, which gives the model up when a backward reaches it."""
        from hasten.techniques.recompute.forward import Repeatable

        module_ref, kind = weakref.ref(module), type(module).__name__
        self.did("model")

        def left_alone(reason: str = "a backward goes through it in eval mode") -> None:
            if (module := module_ref()) is not None and module not in self._alone:
                self._alone.add(module)
                self.gave_up(f"{kind}: {reason}")

        return Repeatable(self.name, left_alone, left_alone, waits=_KEEPS, with_hooks=True)


def unused_graphs(evidence: Evidence) -> int | Refusal:
    """Return the number of eval-mode forwards whose graph nobody used, or a refusal if there are none for certain."""
    with_graph = sum(model.eval_calls_with_graph for model in evidence.models)
    if not any(model.eval_calls for model in evidence.models):
        return Refusal("no forward in eval mode was seen")
    if not with_graph:
        return Refusal("validation builds no graphs already")
    if any(model.backward_through_eval for model in evidence.models):
        return Refusal("a backward went through a forward in eval mode: the graph is used")
    if not any(model.train_calls for model in evidence.models):
        return Refusal("the model is never in train mode, so eval mode does not tell validation")
    return with_graph


def _seconds_of_validation(evidence: Evidence) -> float:
    """Return the seconds per validation batch, without the first batch of each pass; 0 if no pass was seen."""
    passes = [validation for validation in evidence.passes if not validation.trained and validation.batches > 1]
    batches = sum(validation.batches - 1 for validation in passes)
    return sum(validation.end - validation.first for validation in passes) / batches if batches else 0.0
