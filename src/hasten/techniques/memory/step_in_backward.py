"""Parameters stepped one at a time within a backward, and what stands in for a gradient that is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from hasten import messages
from hasten.errors import HastenError
from hasten.evidence.facts import caller

# These compute each parameter's step from that parameter alone: its gradient, its state, its group's options.
BY_ITSELF = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor",
)  # fmt: skip

# Under `hasten check`: by a parameter's id, its value before the step and its gradient, which are gone when the
# witness looks. None: nobody looks, so nothing is kept.
looked_into: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None

_MOVES = ("aten::_to_copy", "aten::clone", "aten::detach", "aten::alias")


def why_not(optimizer: Any) -> tuple[str, str]:
    """Return why an optimizer cannot step one parameter at a time, and what to do; empty where it can."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or kind.__name__ not in BY_ITSELF:
        return f"{kind.__name__} may need more than one parameter at a time", f"use one of {', '.join(BY_ITSELF)}"
    options = [option for option in ("differentiable", "capturable") if optimizer.defaults.get(option)]
    if options or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        what = f"{options[0]}=True" if options else "hooks on its step"
        return f"{kind.__name__} has {what}, and would be stepped once for each parameter", "leave it out"
    if any(not parameter.is_leaf for group in optimizer.param_groups for parameter in group["params"]):
        return "a parameter is no leaf of the graph", "give the optimizer the module's parameters"
    return "", ""


class OneByOne:
    """Steps single parameters of an optimizer, which stays one: its groups, its state, its schedules.

    Args:
        optimizer: One for which `why_not` has nothing to say.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        step = type(optimizer).step
        # Without torch's wrapper around it: hooks that listen to all steps hear of the script's own alone.
        self._step = step.__wrapped__ if getattr(step, "hooked", False) else step
        self._lock = threading.Lock()  # parameters on several devices have backwards in several threads

    def step(self, parameter: torch.Tensor, index: int) -> None:
        """Step one parameter of the group of this index, by its gradient and the group's options of now."""
        optimizer = self._optimizer
        with self._lock:
            groups = optimizer.param_groups
            # As it is now: a scheduler has changed its rate, a checkpoint has put others there.
            optimizer.param_groups = [{**groups[index], "params": [parameter]}]
            try:
                self._step(optimizer)
            finally:
                optimizer.param_groups = groups


class SpentGradient(torch.Tensor):
    """Stands in a parameter's `grad` once it was stepped: shape and type, no memory.

    Whatever computes with it (clipping, a norm, a second backward that adds to it) ends in an error; it may be moved,
    as `model.cpu()` moves gradients along.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: torch.Tensor, **changed: Any) -> SpentGradient:
        options = {"dtype": like.dtype, "device": like.device, **changed}
        made: SpentGradient = torch.Tensor._make_wrapper_subclass(cls, like.shape, **options)
        return made

    def _is_looked_at(self, *_: Any, **__: Any) -> Any:
        raise failure("the script looks at a gradient")

    # What reads memory past the dispatcher.
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
    "aten::zero_": "gradients are set to zero in place, not to None (the technique set_to_none changes that)",
    "aten::_foreach_zero_": "gradients are set to zero in place, not to None (the technique set_to_none changes that)",
}


def failure(why: str) -> HastenError:
    """Return the error for a script that needs a gradient which is gone, and say it."""
    where = f" ({place})" if (place := caller()) else ""
    error = HastenError(
        f"hasten: optimizer_in_backward: {why}, after the backward has stepped{where}",
        "Take optimizer_in_backward out of the plan; what was trained until this step is as without it.",
    )
    messages.tell(str(error))  # a script that skips batches by their errors would hide it
    return error


class Stepped:
    """One optimizer whose parameters the backward steps.

    Args:
        optimizer: One for which `why_not` has nothing to say.
        may_begin: Asked before the first parameter is stepped; False leaves the training as it is.
    """

    def __init__(self, optimizer: Any, may_begin: Callable[[], bool]) -> None:
        self._optimizer, self._may_begin = optimizer, may_begin
        self._one_by_one = OneByOne(optimizer)
        self._options: list[dict[str, Any]] = []
        self.began = self.pending = False
        self._states = 0  # of the optimizer, when the backward began
        self._handles: list[Any] = []
        try:
            for index, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    if parameter.requires_grad:
                        self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook(index)))
        except BaseException:  # one that takes no hooks, as lazy ones do not: none has one then
            self.end()
            raise

    def holds(self, module: Any) -> bool:
        """Return whether a module has parameters of this optimizer."""
        own = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        return any(id(parameter) in own for parameter in module.parameters())

    def end(self) -> None:
        """Leave the next backwards alone. Spent gradients stay: what adds to them must fail, and not begin at 0."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def step(self, plain: Callable[[], Any]) -> Any:
        """Make the script's own step, for what the backward has not stepped.

        Raises:
            HastenError: Rates or other options were changed behind the backward, which stepped with the former ones.
        """
        if self.pending and _options(self._optimizer) != self._options:
            raise failure("options of the optimizer are changed between the backward and its step")
        spent = [
            (parameter, parameter.grad)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if type(parameter.grad) is SpentGradient
        ]
        for parameter, _ in spent:
            parameter.grad = None
        try:
            return plain()
        finally:
            self._in_order()
            self.pending = False
            for parameter, gradient in spent:
                parameter.grad = gradient
            if looked_into is not None:
                looked_into.clear()

    def _in_order(self) -> None:
        """Put states that this step has made in the order of the parameters, as they lie in a checkpoint."""
        state = self._optimizer.state
        new = list(state)[self._states :] if self.pending else []
        if len(new) > 1:
            made = {id(parameter) for parameter in new}
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) in made:
                        state[parameter] = state.pop(parameter)

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if not self.began:
                if not self._may_begin():
                    self.end()
                    return
                self.began = True
            if not self._handles:
                return
            if not self.pending:
                self.pending, self._options = True, _options(self._optimizer)
                self._states = len(self._optimizer.state)
            gradient = parameter.grad
            assert gradient is not None
            if looked_into is not None:
                looked_into[id(parameter)] = parameter.detach().clone(), gradient.clone()
            self._one_by_one.step(parameter, index)
            parameter.grad = SpentGradient(parameter)

        return hook


def _options(optimizer: Any) -> list[dict[str, Any]]:
    """Return each group's options; a tensor by its identity and version, since comparing it may wait for a GPU."""
    return [
        {
            name: (id(value), value._version) if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]
