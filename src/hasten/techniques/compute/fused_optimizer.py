"""The technique `fused_optimizer`: which optimizers may use torch's fused kernels. `fused_update` does the work."""

from __future__ import annotations

import weakref
from typing import Any

from hasten.evidence import Evidence
from hasten.plan import Setting
from hasten.techniques.base import Choices, Effect, Liveness, Refusal, Resource, Technique

FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


class FusedOptimizer(Technique):
    """Update the parameters of torch's own Adam, AdamW, SGD and Adagrad with the kernels of `fused=True`.

    One kernel updates all parameters, instead of one per parameter and operation. The optimizer's options and state,
    and so its checkpoints, are the same as without. Fused kernels read a parameter, its gradient and its state as flat
    memory, so each update is checked first: tensors whose strides differ from their parameter's, that are sparse, have
    gaps or share memory get the ordinary update. So do 16-bit parameters of SGD on a CPU, since torch's kernel skips
    most of them (up to 2.13). Subclasses, and optimizers that are not torch's, are left alone.
    """

    name = "fused_optimizer"
    effect = Effect.ROUNDING
    relieves = Resource.OPTIMIZER
    sources = ("PyTorch performance tuning guide", "Kuhn, tip 4")
    acts_on = "a torch.optim Adam, AdamW, SGD or Adagrad"
    liveness = Liveness.STEP

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose it if torch has a fused kernel for one of the optimizers and the script does not use it."""
        if not evidence.optimizers:
            return Refusal("no optimizer of torch.optim was seen")
        able = [optimizer for optimizer in evidence.optimizers if optimizer.fusable and not optimizer.fused]
        if able:
            return Choices((True,), f"{able[0].name} at {able[0].where} updates its parameters one by one")
        if all(optimizer.fused for optimizer in evidence.optimizers):
            return Refusal("the optimizer is fused already")
        first = next(optimizer for optimizer in evidence.optimizers if not optimizer.fused)
        return Refusal(f"{first.name}: {first.why_not_fusable}")

    def optimizer(self, optimizer: Any) -> None:
        """Hand the optimizer's updates to the fused kernel. Nothing that a checkpoint contains changes."""
        name = type(optimizer).__name__
        if why := why_not_fusable(optimizer):
            self.refused(f"{name}: {why}")
        elif not optimizer.defaults.get("fused"):
            self._optimizers.add(optimizer)
            if self.active:
                self._fuse(optimizer)
            self.did("optimizer")

    def on(self) -> None:
        """Fuse the updates of all optimizers known so far."""
        super().on()
        for optimizer in list(self._optimizers):
            self._fuse(optimizer)

    def off(self) -> None:
        """Return to ordinary updates. They continue with the state that the fused updates left."""
        from hasten.techniques.compute.fused_update import leave_updates

        super().off()
        leave_updates(self._optimizers)

    def teardown(self) -> None:
        """Hand the updates back to torch, restore its functions, and forget the optimizers."""
        from hasten.techniques.compute.fused_update import leave_updates

        leave_updates(self._optimizers)
        self._optimizers.clear()

    def _fuse(self, optimizer: Any) -> None:
        from hasten.techniques.compute.fused_update import fuse_updates

        name = type(optimizer).__name__
        fuse_updates(optimizer, lambda why: self.refused(f"{name}: {why}"))


def why_not_fusable(optimizer: Any) -> str:
    """Return why an optimizer cannot use a fused kernel; "" if it can."""
    import torch

    kind = type(optimizer)
    if kind.__module__ != f"torch.optim.{kind.__name__.lower()}" or kind.__name__ not in FUSED:
        return "torch has no fused kernel for it"
    if optimizer.defaults.get("differentiable"):
        return "a differentiable optimizer cannot be fused"
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not torch.is_floating_point(parameter):
                return "it has parameters that are not floating-point tensors"
            if parameter.device.type not in ("cpu", "cuda", "mps", "xpu"):
                return f"no fused kernel on {parameter.device.type}"
    if isinstance(optimizer.defaults.get("lr"), torch.Tensor) and kind.__name__ == "Adagrad":
        return "a learning rate that is a tensor cannot be fused"
    return ""
