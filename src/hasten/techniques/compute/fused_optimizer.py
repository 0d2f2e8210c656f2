"""Optimizers that update all parameters in one kernel."""

from __future__ import annotations

from typing import Any

from hasten.evidence import Evidence, Finding, HowKnown, Phase
from hasten.evidence.figures import percent
from hasten.evidence.weigh import in_words, seconds_of, share_of, timed
from hasten.techniques.base import Choices, Effect, Refusal, Resource, Technique

FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


class FusedOptimizer(Technique):
    """Make torch's own Adam, AdamW, SGD and Adagrad what they would be if built with `fused=True`.

    One kernel for all parameters in place of one per parameter and operation. Subclasses and optimizers by
    others are left alone, as are sparse gradients and complex parameters. After a checkpoint of an optimizer that
    was not fused is loaded, it is fused again.
    """

    name = "fused_optimizer"
    finds = "per_tensor_optimizer"
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

    @classmethod
    def finding(cls, evidence: Evidence) -> Finding | None:
        """The share of the optimizer's step that its fused kernel saves, tried on parameters of the same shapes."""
        tried = evidence.measured_for(cls.finds)
        taken = sum(one.before * one.calls for one in tried)
        if not tried or taken <= 0 or isinstance(cls.settings(evidence), Refusal):
            return None
        phase = share_of(evidence, seconds_of(evidence, Phase.OPTIMIZER))
        first = max(tried, key=lambda one: one.saved * one.calls)
        less = sum(one.saved * one.calls for one in tried) / taken
        words = f"the optimizer takes {percent(phase)} of the step; {first.what}, it takes {percent(first.gain)} less"
        if len(tried) > 1:
            take = f"{len(tried)} optimizers take {percent(phase)} of the step"
            words = f"{take}; fused, they take {percent(less)} less together"
        return timed(
            cls.finds,
            words,
            "build it with fused=True" if len(tried) == 1 else "build them with fused=True",
            phase * less, HowKnown.MEASURED,
            place=first.where,
            details=tuple(map(in_words, tried)),
            technique=cls.name, setting="true", sources=cls.sources,
        )  # fmt: skip

    def optimizer(self, optimizer: Any) -> None:
        """Ask for the fused kernel; take it back where the first gradients turn out to be sparse."""
        kind = type(optimizer)
        if why := _why_not(optimizer):
            self.refused(f"{kind.__name__}: {why}")
            return
        if not optimizer.defaults.get("fused"):
            fuse(optimizer)
            self.did("optimizer")
        looked: list[bool] = []

        def look_once(this: Any, *_: Any) -> None:
            if looked:
                return
            looked.append(True)
            groups = this.param_groups
            sparse = any(p.grad is not None and p.grad.is_sparse for group in groups for p in group["params"])
            if why := "its gradients are sparse" if sparse else _why_not(this):  # groups may have been added
                for options in (this.defaults, *groups):
                    options["fused"] = False
                this._step_supports_amp_scaling = False
                self.refused(f"{kind.__name__}: {why}")

        def fuse_again(this: Any) -> None:
            groups = this.param_groups
            if this.defaults["fused"] and not any(group["fused"] for group in groups):  # of a run without fusing
                for group in groups:
                    group["fused"], group["foreach"] = True, None
                _move_counters(this)

        optimizer.register_step_pre_hook(look_once)
        optimizer.register_load_state_dict_post_hook(fuse_again)


def fuse(optimizer: Any) -> None:
    """Make an optimizer that has a fused kernel what it would be if built with `fused=True, foreach=None`.

    Groups that were given options of their own keep them. Where steps were made already, their counters move to
    where the fused kernel reads them.
    """
    fused, foreach = optimizer.defaults.get("fused"), optimizer.defaults.get("foreach")
    for group in optimizer.param_groups:
        if group["fused"] is fused:
            group["fused"] = True
        if group["foreach"] is foreach:
            group["foreach"] = None
    optimizer.defaults.update(fused=True, foreach=None)
    optimizer._step_supports_amp_scaling = True
    if type(optimizer).__name__ in ("SGD", "Adagrad"):
        optimizer._need_device_dtype_check_for_fused = True
    _move_counters(optimizer)


def _move_counters(optimizer: Any) -> None:
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"] if group["fused"] else ():
            state = optimizer.state.get(parameter, {})
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].to(device=parameter.device, dtype=torch.float32)


def _why_not(optimizer: Any) -> str:
    return why_not_fusable(type(optimizer), {**optimizer.defaults, "params": list(optimizer.param_groups)})


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
