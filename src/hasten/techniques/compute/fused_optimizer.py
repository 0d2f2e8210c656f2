"""Optimizers that update all parameters in one kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hasten.evidence import Evidence
from hasten.techniques.base import Choices, Effect, Refusal, Resource, Technique

FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


class FusedOptimizer(Technique):
    """Build torch's own Adam, AdamW, SGD and Adagrad with `fused=True`.

    One kernel for all parameters in place of one per parameter and operation. Subclasses and optimizers by
    others are left alone, as are sparse gradients and complex parameters.
    """

    name = "fused_optimizer"
    effect = Effect.ROUNDING
    relieves = Resource.OPTIMIZER
    sources = ("PyTorch performance tuning guide", "Kuhn, tip 4")
    acts_on = "a torch.optim Adam, AdamW, SGD or Adagrad"

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """On where an optimizer has a fused kernel that is not used."""
        if not evidence.optimizers:
            return Refusal("no optimizer of torch.optim was seen")
        able = [optimizer for optimizer in evidence.optimizers if optimizer.fusable and not optimizer.fused]
        if able:
            return Choices((True,), f"{able[0].name} at {able[0].where} updates its parameters one by one")
        if all(optimizer.fused for optimizer in evidence.optimizers):
            return Refusal("the optimizer is fused already")
        first = next(optimizer for optimizer in evidence.optimizers if not optimizer.fused)
        return Refusal(f"{first.name}: {first.why_not_fusable}")

    def optimizer_options(self, kind: Any, options: dict[str, Any]) -> None:
        """Ask for the fused kernel."""
        _list_parameters(options.get("params"))
        if why := why_not_fusable(kind, options):
            self.refused(f"{kind.__name__}: {why}")
            return
        if not options.get("fused"):
            options["fused"] = True
            options["foreach"] = None
            self.did("optimizer")

    def optimizer(self, optimizer: Any) -> None:
        """Take the fused kernel back where the first gradients turn out to be sparse."""
        if not optimizer.defaults.get("fused") or type(optimizer).__name__ not in ("SGD", "Adagrad"):
            return
        looked: list[bool] = []

        def look_once(this: Any, *_: Any) -> None:
            if looked:
                return
            looked.append(True)
            if any(p.grad is not None and p.grad.is_sparse for group in this.param_groups for p in group["params"]):
                for options in (this.defaults, *this.param_groups):
                    options["fused"] = False
                this._step_supports_amp_scaling = False
                self.refused(f"{type(this).__name__}: its gradients are sparse")

        optimizer.register_step_pre_hook(look_once)


def _list_parameters(groups: Any) -> None:
    """Make lists of what can be read once only, in place, as the optimizer itself does with its groups."""
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict) and isinstance(group.get("params"), Iterator):
            group["params"] = list(group["params"])


def why_not_fusable(kind: Any, options: dict[str, Any]) -> str:
    """Why an optimizer of this class with these arguments has no fused kernel, or ""."""
    import torch

    if kind.__module__ != f"torch.optim.{kind.__name__.lower()}" or kind.__name__ not in FUSED:
        return "torch has no fused kernel for it"
    if options.get("differentiable"):
        return "a differentiable optimizer cannot be fused"
    groups = options.get("params")
    if not isinstance(groups, list):
        return "its parameters are not a list"
    for group in groups:
        for parameter in group["params"] if isinstance(group, dict) else [group]:
            tensor = parameter[1] if isinstance(parameter, tuple) else parameter
            if not isinstance(tensor, torch.Tensor) or not torch.is_floating_point(tensor):
                return "it has parameters that are not floating-point tensors"
            if tensor.device.type not in ("cpu", "cuda", "mps", "xpu"):
                return f"no fused kernel on {tensor.device.type}"
    lr = options.get("lr")
    if isinstance(lr, torch.Tensor) and kind.__name__ == "Adagrad":
        return "a learning rate that is a tensor cannot be fused"
    return ""
