"""Rules on optimizers and what goes with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import libcst as cst

from hasten.doctor.source.code import Code
from hasten.doctor.source.rule import Mend, Problem, Rule
from hasten.doctor.source.syntax import argument, is_word, last_name, walk, without_argument
from hasten.evidence import Severity

_RECURRENT = frozenset(
    ["torch.nn.LSTM", "torch.nn.GRU", "torch.nn.RNN", "torch.nn.LSTMCell", "torch.nn.GRUCell", "torch.nn.RNNCell"]
)
_RATE_WORDS = (
    "lr_scheduler",
    "scheduler",
    "adjust_learning_rate",
    "param_groups",
    "get_lr",
    "configure_optimizers",
    "sched",
)


class ZeroedGradients(Rule):
    """`zero_grad(set_to_none=False)` writes zeros that backward then adds to."""

    name = "zeroed_gradients"
    technique = "set_to_none"
    sources = ("Lin, tip 14", "Kuhn, tip 10")

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Calls that ask for zeros."""
        for call in code.script.calls:
            if last_name(call.func) != "zero_grad" or not isinstance(call.func, cst.Attribute) or len(call.args) != 1:
                continue
            arg = call.args[0]
            if arg.star or not is_word(arg.value, "False") or (arg.keyword and arg.keyword.value != "set_to_none"):
                continue
            if any(isinstance(node, cst.Attribute) and node.attr.value == "grad" for node in code.script.nodes):
                continue  # it reads `.grad`, which would be None
            yield Problem(
                call,
                "gradients are set to zero instead of being let go",
                "remove set_to_none=False",
                (Mend(call, _without_first),),
            )


def _without_first(call: Any) -> cst.CSTNode:
    return without_argument(call, call.args[0])


class PerTensorOptimizer(Rule):
    """`foreach=False` updates one tensor at a time."""

    name = "per_tensor_optimizer"
    technique = "fused_optimizer"
    sources = ("PyTorch performance tuning guide", "Kuhn, tip 4")

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Optimizers that are told to."""
        for call in code.script.optimizers:
            if is_word(argument(call, "foreach"), "False") and not is_word(argument(call, "fused"), "True"):
                yield Problem(
                    call, "the optimizer updates one tensor at a time", "remove foreach=False, or give fused=True"
                )


class AdamWithL2(Rule):
    """Adam's weight_decay is an L2 term that its own scaling undoes; AdamW decays the weights themselves."""

    name = "adam_with_l2"
    severity = Severity.NOTE
    sources = ("Loshchilov and Hutter, Decoupled Weight Decay Regularization", "Kuhn, tip 4")

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Adam with a weight decay that is not zero."""
        for call in code.script.optimizers:
            if last_name(call.func) != "Adam" or argument(call, "decoupled_weight_decay") is not None:
                continue
            decay = code.script.value_of(argument(call, "weight_decay", 4))
            if isinstance(decay, int | float) and decay > 0:
                yield Problem(
                    call, f"Adam's weight_decay={decay:g} is scaled away by Adam", "use AdamW if weight decay is meant"
                )


class NoGradientClipping(Rule):
    """A recurrent net's gradients can explode; clipping their norm keeps a bad batch from ending the training."""

    name = "no_gradient_clipping"
    severity = Severity.NOTE
    sources = ("Pascanu et al., On the difficulty of training recurrent neural networks", "Kuhn, tip 16")

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Recurrent nets that are trained in this file without clipping."""
        clips = any("clip" in node.value for node in code.script.nodes if isinstance(node, cst.Name))
        recurrent = next((call for call in code.script.calls if code.script.qualified(call.func) in _RECURRENT), None)
        by_curvature = {last_name(call.func) for call in code.script.optimizers} == {"LBFGS"}
        if clips or recurrent is None or by_curvature:
            return
        for call in code.script.calls:
            if code.training.goes_backward(call) and code.training.in_step(call):
                yield Problem(
                    call,
                    f"a recurrent net ({last_name(recurrent.func)}, line {code.script.line(recurrent)}) trains without "
                    "gradient clipping",
                    "call torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) after backward()",
                )
                return


class ConstantRate(Rule):
    """A learning rate that falls, or warms up and falls, mostly trains further in the same number of steps."""

    name = "constant_rate"
    severity = Severity.NOTE
    sources = ("Kuhn, tip 1", "Smith, Super-Convergence")

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """The one optimizer of a file that trains a model over epochs, where nothing changes its rate."""
        names = {node.value for node in code.script.nodes if isinstance(node, cst.Name)}
        if len(code.script.optimizers) != 1 or any(word in name.lower() for name in names for word in _RATE_WORDS):
            return
        if not code.training.step_loops or any(name in names for name in ("Accelerator", "deepspeed", "Trainer")):
            return
        call = code.script.optimizers[0]
        first = call.args[0].value if call.args else None
        of_model = first is not None and any(
            isinstance(node, cst.Call) and last_name(node.func) in ("parameters", "named_parameters")
            for node in walk(first)
        )
        if of_model and last_name(call.func) != "LBFGS":
            yield Problem(
                call,
                "the learning rate stays the same throughout",
                "try a schedule: torch.optim.lr_scheduler.OneCycleLR",
            )
