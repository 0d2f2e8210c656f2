"""`optimizer_in_backward=True`: steps each parameter within the backward, as soon as its gradient is accumulated.

A hook on each parameter steps it and drops its gradient, so all gradients are never in memory at once. This is only
right if nothing needs a gradient, or the old weight, later in the step: `_refusal` checks that before training, and
`WeightsWatch` and `_once` catch a backward that uses a stepped weight again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hasten.errors import HastenError
from hasten.techniques.memory import step_in_backward as stepping
from hasten.techniques.memory.step_in_backward import ParameterStepper, in_order, tensors_of, why_not
from hasten.techniques.memory.weights_at_rest import WeightsWatch

if TYPE_CHECKING:
    from hasten.trainer.hooks import Hooks
    from hasten.trainer.trainer import Trainer

_SEE_GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")


def step_in_backward(
    trainer: Trainer, hooks: Hooks, optimizer: Any, backward: Callable[..., None]
) -> tuple[list[Any], Callable[..., None]]:
    """Make the backward step the parameters of an optimizer; the later `optimizer.step()` then finds no gradients.

    The optimizer is still one object with all its groups and state, so schedulers and checkpoints see no difference.

    Returns:
        The handles of the hooks, whose `remove` ends this, and `backward`, which raises if it reuses stepped weights.

    Raises:
        HastenError: Something needs all gradients at once, or differentiates more than once per step.
    """
    if why := _refusal(trainer, hooks, optimizer):
        raise trainer.misconfigured(f"optimizer_in_backward=True: {why[0]}", why[1])
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    stepper = _Stepper(trainer, optimizer, names)
    handles = [
        parameter.register_post_accumulate_grad_hook(stepper)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]

    def watched(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        states = len(optimizer.state)
        stepper.at_rest.begin()
        try:
            backward(loss, *args, **kwargs)
        finally:
            stepper.at_rest.end()
        # The backward steps parameters last to first: put new optimizer states into the order a normal step gives.
        in_order(optimizer, states)

    return handles, watched


class _Stepper:
    """Post-accumulate-grad hook that steps one parameter at a time.

    Args:
        trainer: The Trainer, whose step count tells steps apart.
        optimizer: The optimizer of the parameters.
        names: Parameter names by `id`, for messages.
    """

    def __init__(self, trainer: Trainer, optimizer: Any, names: dict[int, str]) -> None:
        self._progress, self._names = trainer.progress, names
        self._optimizer, self._one_by_one = optimizer, ParameterStepper(optimizer)
        self.at_rest = WeightsWatch(_touched)
        self._stepped: dict[int, int] = {}  # id of a parameter -> the global step in which it was stepped
        self._of_step = -1

    def __call__(self, parameter: torch.Tensor) -> None:
        """Step a parameter and drop its gradient; a parameter that is in no group any more keeps its gradient."""
        if self._of_step != self._progress.global_step:
            self._of_step = self._progress.global_step
            self._one_by_one.begin()
            if stepping.inspected is not None:
                stepping.inspected.clear()
        if parameter.grad is None or not self._one_by_one.has(parameter):
            return
        self._once(parameter)
        with self.at_rest.of_our_own():
            if stepping.inspected is not None:  # `Trainer.check` compares both after the step
                stepping.inspected[id(parameter)] = parameter.detach().clone(), parameter.grad.clone()
            self._one_by_one.step(parameter)
            parameter.grad = None
            self.at_rest.add(parameter, *tensors_of(self._optimizer.state.get(parameter)))

    def _once(self, parameter: torch.Tensor) -> None:
        """Raise if a parameter gets a second gradient in one step."""
        now = self._progress.global_step
        if self._stepped.get(id(parameter)) == now:
            raise HastenError(
                f"optimizer_in_backward=True: {self._names.get(id(parameter), 'a parameter')} got a second gradient in"
                " one step, after it was stepped by the first",
                "leave the flag out: something differentiates twice in a step (two losses, reentrant checkpoints)",
            )
        self._stepped[id(parameter)] = now


def _touched(operation: str) -> None:
    """Raise: an operation uses weights that this backward has already stepped."""
    raise HastenError(
        f"optimizer_in_backward=True: weights that the backward has stepped are used again in it ({operation}), by a"
        " second loss, a recomputation or a stop-gradient",
        "leave the flag out, and go on from the last checkpoint: the weights have taken part of this step already",
    )


def _refusal(trainer: Trainer, hooks: Hooks, optimizer: Any) -> tuple[str, str] | None:
    """Return why the flag cannot be used, and what to do; None if it can."""
    config = trainer.config
    by_flag = {
        "several processes exchange gradients after that": trainer.world.size > 1,
        f"gradient_clip_val={config.gradient_clip_val} needs all gradients at once": bool(config.gradient_clip_val),
        "accumulate_grad_batches gathers gradients over several batches": config.accumulate_grad_batches != 1
        or bool(trainer._callbacks_named("GradientAccumulationScheduler")),
        f"microbatch={config.microbatch!r} gathers gradients over several backwards": config.microbatch is not None,
        'precision="16-mixed" looks for overflows in all gradients before it steps': config.precision == "16-mixed",
    }
    for why, applies in by_flag.items():
        if applies:
            return why, "leave one of them out"
    acting = {technique.name for technique in trainer.engine.run.techniques}
    inside = sorted({"lr_scale", "batch_scale", "schedule"} & acting)
    if inside:
        return (
            f"{inside[0]} of the plan acts within the optimizer's step, which is not called then",
            "leave one of them out",
        )
    if (refusal := why_not(optimizer))[0]:
        return refusal
    for name in _SEE_GRADIENTS:
        if hooks.of(name):
            owners = [
                type(callback).__name__ for callback in trainer.callbacks if hooks.of_callbacks(name, among=[callback])
            ]
            owner_name = owners[0] if owners else type(trainer.model).__name__
            return f"{owner_name}.{name} would find no gradients", "leave one of them out"
    return None
