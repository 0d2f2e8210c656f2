"""Step parameters one at a time within a backward, and replace their gradients by stand-ins.

A hook on each parameter runs when its gradient is complete: it steps the parameter (`ParameterStepper`) and puts a
`SpentGradient` into its `grad`. The script's own `optimizer.step` then finds no gradients; before it runs,
`SteppedOptimizer` verifies that gradients, weights and options are as the backward left them. In between,
`WeightsWatch` forbids to touch stepped weights. Invariant: a script that would see another number than without the
technique gets an error instead.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hasten import messages
from hasten.errors import HastenError
from hasten.evidence.facts import caller
from hasten.techniques.memory.weights_at_rest import WeightsWatch, others_on

# Optimizers that compute a parameter's step from that parameter alone: its gradient, its state, its group's options.
BY_ITSELF = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor",
)  # fmt: skip

# Under `hasten check`: id of a parameter -> its value before the step, and its gradient; neither exists any more when
# the witness compares them. None if nobody compares, so that nothing is kept.
inspected: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None

# Techniques that record each failure in the run's evidence, since a script may swallow the error.
noting: weakref.WeakSet[Any] = weakref.WeakSet()

_MOVES = ("aten::_to_copy", "aten::clone", "aten::detach", "aten::alias")  # operations that a stand-in survives


def why_not(optimizer: Any) -> tuple[str, str]:
    """Return why an optimizer cannot step one parameter at a time, and what to do; two empty strings if it can."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or kind.__name__ not in BY_ITSELF:
        return f"{kind.__name__} may need more than one parameter at a time", f"use one of {', '.join(BY_ITSELF)}"
    options = [option for option in ("differentiable", "capturable") if optimizer.defaults.get(option)]
    if options or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks or _hooks_on_all_steps():
        reason = f"{options[0]}=True" if options else "hooks on its step"
        return f"{kind.__name__} has {reason}, and would be stepped once for each parameter", "leave it out"
    if any(not parameter.is_leaf for group in optimizer.param_groups for parameter in group["params"]):
        return "a parameter is no leaf of the graph", "give the optimizer the module's parameters"
    return "", ""


def _hooks_on_all_steps() -> bool:
    """Return whether hooks other than hasten's are registered for the steps of all optimizers."""
    from torch.optim import optimizer

    hooks = [*optimizer._global_optimizer_pre_hooks.values(), *optimizer._global_optimizer_post_hooks.values()]
    return any(not str(getattr(hook, "__module__", "")).startswith("hasten.") for hook in hooks)


class ParameterStepper:
    """Step single parameters of an optimizer, by swapping in a group with that parameter alone.

    It remains one optimizer, with its groups, state and schedules.

    Args:
        optimizer: An optimizer for which `why_not` returns no reason.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        step = type(optimizer).step
        # Without torch's profiling wrapper, so that hooks on all steps are called for the script's own step only.
        self._step = step.__wrapped__ if getattr(step, "hooked", False) else step
        self._lock = threading.Lock()  # autograd runs the backward of each device in a thread of that device
        self._groups: dict[int, dict[str, Any]] = {}

    def begin(self) -> None:
        """Read each parameter's group. Called at the first gradient of each step, as a script may move parameters."""
        self._groups = {id(parameter): group for group in self._optimizer.param_groups for parameter in group["params"]}

    def has(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is in one of the optimizer's groups."""
        return id(parameter) in self._groups

    def step(self, parameter: torch.Tensor) -> None:
        """Step one parameter with its gradient and the options of its group."""
        optimizer = self._optimizer
        with self._lock:
            groups = optimizer.param_groups
            optimizer.param_groups = [{**self._groups[id(parameter)], "params": [parameter]}]
            try:
                self._step(optimizer)
            finally:
                optimizer.param_groups = groups


class SpentGradient(torch.Tensor):
    """Stand-in for the `grad` of a parameter that was stepped: it has shape and dtype, but no memory.

    Whatever computes with it (clipping, a norm, a second backward that adds to it) ends in an error. It may be moved
    and converted, since `model.cpu()` does that with gradients.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: torch.Tensor, **changed: Any) -> SpentGradient:
        options = {"dtype": like.dtype, "device": like.device, **changed}
        made: SpentGradient = torch.Tensor._make_wrapper_subclass(cls, like.shape, **options)
        return made

    def _is_looked_at(self, *_: Any, **__: Any) -> Any:
        raise failure("the script looks at a gradient")

    def _becomes(self, other: Any) -> None:
        if type(other) is not SpentGradient:  # `model.double()` assigns a converted stand-in: that is allowed
            self._is_looked_at()
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]

    data = property(_is_looked_at, _becomes)
    # Methods that read memory without calling the dispatcher.
    numpy = tolist = __array__ = data_ptr = untyped_storage = _is_looked_at

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"SpentGradient({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name
        if name in _MOVES:
            changed = {key: value for key in ("dtype", "device") if (value := (kwargs or {}).get(key)) is not None}
            return cls(args[0], **changed)
        raise failure(_MEANS.get(name, f"the script looks at a gradient ({name.removeprefix('aten::')})"))


_MEANS = {
    "aten::add_": "a second backward adds to a gradient (accumulation, two losses, or no zero_grad before it)",
    "aten::zero_": "gradients are set to zero in place, not to None (`zero_grad()` without set_to_none=False)",
    "aten::_foreach_zero_": "gradients are set to zero in place, not to None (`zero_grad()` without set_to_none=False)",
}


def failure(why: str) -> HastenError:
    """Return the error for a script that needs a gradient or weight that the backward has changed.

    Also tell the user, and record the failure in the evidence.
    """
    where = f" ({place})" if (place := caller()) else ""
    error = HastenError(
        f"hasten: optimizer_in_backward: {why}, but the backward has stepped already{where}",
        "Take optimizer_in_backward out of the plan. The weights have taken part of this step already: "
        "go on from the last checkpoint.",
    )
    messages.tell(str(error))  # a script that skips batches by their errors would hide it
    for technique in list(noting):
        technique.failed(why)
    return error


class SteppedOptimizer:
    """One optimizer whose parameters the backward steps.

    Args:
        optimizer: An optimizer for which `why_not` returns no reason.
        may_begin: Called before the first parameter of each step, with whether the start of the backward was seen. If
            it returns False, nothing is stepped in backwards any more.

    Attributes:
        pending: Whether a backward has stepped parameters and the script's step is due.
    """

    def __init__(self, optimizer: Any, may_begin: Callable[[bool], bool]) -> None:
        self._optimizer, self._may_begin = optimizer, may_begin
        self._one_by_one = ParameterStepper(optimizer)
        self._at_rest = WeightsWatch(_touched)
        self._options: list[dict[str, Any]] = []
        self._records: dict[int, _StepRecord] = {}  # id of a parameter -> its record, since the script's last step
        self.pending = False
        self._states = 0  # number of states in the optimizer when the backward began
        self._begins = threading.Lock()
        self._handles: list[Any] = []
        try:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad:
                        self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook))
        except BaseException:  # a parameter that takes no hooks, such as a lazy one: remove the other hooks too
            self.end()
            raise
        optimizer.register_state_dict_pre_hook(self._saved)
        optimizer.register_load_state_dict_pre_hook(self._saved)

    def holds(self, module: Any) -> bool:
        """Return whether a module has parameters of this optimizer."""
        own = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        return any(id(parameter) in own for parameter in module.parameters())

    def end(self) -> None:
        """Step nothing in later backwards. Stand-ins remain: adding to them must fail rather than start at 0."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def teardown(self) -> None:
        """Step nothing any more, and drop a pending step's records."""
        self.end()
        self.pending, self._records = False, {}
        self._at_rest.end()

    def backward(self, call: Callable[[], Any]) -> Any:
        """Run a backward, and watch the stepped weights until the script's step."""
        if self._at_rest.open:  # a backward within another, or a second one before the step
            return call()
        if others_on() or not self._handles:  # unwatched: with another mode on, `may_begin` will refuse
            return call()
        self._at_rest.begin()
        try:
            return call()
        finally:
            if self.pending:
                self._at_rest.between()
            else:
                self._at_rest.end()

    def step(self, plain: Callable[[], Any], has_closure: bool = False) -> Any:
        """Make the script's own step, for parameters that the backward has not stepped.

        Raises:
            HastenError: Gradients, weights or options were changed after the backward, which stepped with the old ones.
        """
        spent = [
            (parameter, parameter.grad)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if type(parameter.grad) is SpentGradient
        ]
        with self._at_rest.of_our_own():
            why = self._changed(has_closure) or self._stale(spent)
        if why:
            raise failure(why)
        if not self._at_rest.end():
            raise failure("a TorchDispatchMode is entered between a backward and its step")
        for parameter, _ in spent:
            parameter.grad = None
        try:
            return plain()
        finally:
            if self.pending:
                in_order(self._optimizer, self._states)
            self.pending, self._records = False, {}
            for parameter, gradient in spent:
                parameter.grad = gradient
            if inspected is not None:
                inspected.clear()

    def _changed(self, has_closure: bool) -> str:
        """Return what the script has changed since the backward that its step would have used; "" for nothing."""
        if not self.pending:
            return ""
        if has_closure:
            return "the optimizer's step gets a closure"
        if _options(self._optimizer) != self._options:
            return "options of the optimizer are changed between the backward and its step"
        if why := why_not(self._optimizer)[0]:
            return why
        if any(record.parameter.grad is not record.stand_in for record in self._records.values()):
            return "a gradient was dropped or replaced between the backward and its step"
        if any(record.is_changed() for record in self._records.values()):
            return "weights are written between the backward and its step"
        return ""

    def _stale(self, spent: list[tuple[Any, Any]]) -> str:
        """Return what is wrong with stand-ins of an earlier backward, which this step would use; "" for nothing."""
        stale = any(id(parameter) not in self._records for parameter, _ in spent)
        return "a step uses a gradient of an earlier backward again (a second step, or no zero_grad)" if stale else ""

    def _saved(self, *_: Any) -> None:
        """Refuse to save or load the optimizer's state before the script's step."""
        if self.pending:
            raise failure("the optimizer's state is saved or loaded between a backward and its step")

    def _begin(self) -> bool:
        """Return whether parameters may be stepped; at the first parameter of a step, find out and prepare."""
        with self._begins:
            if self.pending or not self._handles:
                return self.pending and bool(self._handles)
            if not self._may_begin(self._at_rest.open):
                self.end()
                return False
            self._options, self._states = _options(self._optimizer), len(self._optimizer.state)
            self._one_by_one.begin()
            self.pending = True
            return True

    def _hook(self, parameter: torch.Tensor) -> None:
        """Step a parameter whose gradient is complete, and replace the gradient by a stand-in."""
        if parameter.grad is None or not self._begin() or not self._one_by_one.has(parameter):
            return
        if id(parameter) in self._records:
            raise failure("a parameter gets a second gradient before the optimizer's step")
        with self._at_rest.of_our_own():
            if inspected is not None:
                inspected[id(parameter)] = parameter.detach().clone(), parameter.grad.clone()
            self._one_by_one.step(parameter)
            self._records[id(parameter)] = record = _StepRecord(parameter)
            parameter.grad = record.stand_in
            self._at_rest.add(parameter, *tensors_of(self._optimizer.state.get(parameter)))


def in_order(optimizer: Any, count: int) -> None:
    """Sort the states beyond the first `count`, made by this step, in the order of the parameters.

    A plain step makes them in that order, a backward in the order of its gradients; checkpoints keep the order.
    """
    state = optimizer.state
    if len(state) > count + 1:
        added = {id(parameter) for parameter in list(state)[count:]}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in added:
                    state[parameter] = state.pop(parameter)


class _StepRecord:
    """Record of a parameter as the backward left it after its step."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter, self.stand_in = parameter, SpentGradient(parameter)
        self._version, self._storage = parameter._version, parameter.untyped_storage()

    def is_changed(self) -> bool:
        """Return whether the parameter was written since, or has another storage."""
        now = self.parameter.untyped_storage()._cdata
        return self.parameter._version != self._version or now != self._storage._cdata


def _touched(operation: str) -> None:
    """Raise the error for an operation on stepped weights."""
    if torch._C._current_graph_task_id() != -1:
        raise failure(
            f"weights that it has stepped are used again within it ({operation}: a recomputation, or a stop-gradient)"
        )
    raise failure(f"weights are read, saved or written between a backward and its step ({operation})")


def tensors_of(state: Any) -> list[torch.Tensor]:
    """Return the tensors of a parameter's state."""
    return [value for value in (state or {}).values() if isinstance(value, torch.Tensor)]


def _options(optimizer: Any) -> list[dict[str, Any]]:
    """Return each group's options, with tensors by identity and version, since comparing values may wait for a GPU."""
    return [
        {
            name: (id(value), value._version) if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        | {"params": [id(parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
