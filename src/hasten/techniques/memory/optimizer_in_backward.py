"""The technique `optimizer_in_backward`: step each parameter in the backward, and drop its gradient at once.

This file decides whether that is safe and wraps the optimizer's step. `step_in_backward` makes the steps and puts
stand-ins in place of gradients; `weights_at_rest` watches that nobody touches stepped weights before the script's step.
"""

from __future__ import annotations

import atexit
import functools
import types
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hasten import messages
from hasten.evidence import Evidence
from hasten.plan import Setting
from hasten.techniques import gradient_access
from hasten.techniques.base import Call, Choices, Effect, Refusal, Resource, Technique

if TYPE_CHECKING:
    from hasten.techniques.memory.step_in_backward import SteppedOptimizer

_STEPS_OTHERWISE = ("lr_scale", "batch_scale", "schedule")


class OptimizerInBackward(Technique):
    """Step each parameter within the backward and drop its gradient, so that gradients never all exist at once.

    The results are the same bits, and memory shrinks by about the size of the parameters, for torch's optimizers that
    step each parameter independently. It remains one optimizer: groups, state, schedules and checkpoints do not change.
    Afterwards each `grad` is an empty stand-in: whatever computes with it ends in an error (clipping, norms,
    accumulation over several backwards, zeroing in place), never in another number. An error also follows a step whose
    gradients were dropped or replaced (`p.grad = None`, `zero_grad` to skip a bad batch), a second step, changed rates,
    and any read, save or write of the weights between a backward and its step (an average, a checkpoint, a forward), or
    within the backward once they are stepped. Blocks recomputed by torch's `checkpoint` give equal results. Not noticed
    there are other threads, and numpy arrays over the weights' memory that were made earlier.

    Left alone, with a line that says why, are scripts with several optimizers, closures, hooks on the step, loss
    scaling (`GradScaler`) or several processes. The Trainer has it as a flag.
    """

    name = "optimizer_in_backward"
    effect = Effect.EXACT
    relieves = Resource.MEMORY
    sources = ("PyTorch tutorial: how to save memory by fusing the optimizer step into the backward pass",)
    acts_on = "an optimizer of torch.optim that steps each parameter by itself"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped: SteppedOptimizer | None = None
        self._has_stepped = False  # whether a backward has stepped parameters
        self._left_alone = ""  # why nothing is stepped in backwards any more

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose nothing: it saves memory, and no time."""
        return Refusal("it saves memory, and no time: `hasten tune --memory SIZE` tries it")

    @classmethod
    def clashes(cls, setting: Setting, plan: Mapping[str, Setting]) -> str:
        """Refuse techniques that act within the optimizer's step, or on all gradients before it."""
        if plan.get("precision") == "16-mixed":
            return 'precision = "16-mixed" looks for overflows in all gradients before the optimizer steps'
        inside = next((name for name in _STEPS_OTHERWISE if plan.get(name, False) is not False), "")
        return f"{inside} acts within the optimizer's step, which is not called then" if inside else ""

    def process(self) -> None:
        """Watch for a script that scales its loss: the backward would step by gradients that are still scaled."""
        gradient_access.watch_scaling(self, OptimizerInBackward._leave)

    def restore(self) -> None:
        """Stop watching."""
        gradient_access.leave(self)

    def teardown(self) -> None:
        """Return to plain backwards and steps, and forget the optimizers."""
        if self._stepped is not None:
            self._stepped.teardown()
            self._stepped = None
        self._optimizers.clear()

    def optimizer(self, optimizer: Any) -> None:
        """Let backwards step this optimizer's parameters; the script's own step then finds no gradients."""
        from hasten.techniques.memory.step_in_backward import SteppedOptimizer, noting, why_not

        self._optimizers.add(optimizer)
        if self._left_alone:
            return
        if self._stepped is not None:
            self._leave("the script builds another optimizer: a loss of the one may reach parameters of the other")
            return
        if why := why_not(optimizer)[0]:
            self._leave(why)
            return
        stepped = self._stepped = SteppedOptimizer(optimizer, lambda seen: self._may_begin(optimizer, seen))
        noting.add(self)
        plain = optimizer.step

        @functools.wraps(plain)
        def step(this: Any, *args: Any, **kwargs: Any) -> Any:
            has_closure = (args[0] if args else kwargs.get("closure")) is not None
            if has_closure:
                self._leave("the optimizer's step gets a closure")
            return stepped.step(functools.partial(plain, *args, **kwargs), has_closure)

        optimizer.step = types.MethodType(step, optimizer)  # LR schedulers wrap `step` too, and expect a bound method
        self.did("optimizer")

    def backward(self, call: Call) -> Call:
        """Watch, from each backward to the script's step, that nobody touches the stepped weights."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._stepped is None:
                return call(*args, **kwargs)
            return self._stepped.backward(functools.partial(call, *args, **kwargs))

        return watched

    def forward(self, call: Call) -> Call:
        """Raise an error for a forward between a backward and the script's step: its weights are those after the step.

        A forward within a backward is a recomputation, and allowed here: it may come before its weights are stepped.
        """
        import torch

        def in_order(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            stepped = self._stepped
            between = stepped is not None and stepped.pending and torch._C._current_graph_task_id() == -1
            if stepped is not None and between and stepped.holds(module):
                from hasten.techniques.memory.step_in_backward import failure

                raise failure("the model is run between a backward and the optimizer's step, or that step was left out")
            return call(module, args, kwargs)

        return in_order

    def _may_begin(self, optimizer: Any, seen: bool) -> bool:
        """Return whether a backward may step; test what is known only when the first gradient arrives."""
        import torch

        from hasten.techniques.memory.step_in_backward import why_not
        from hasten.techniques.memory.weights_at_rest import others_on

        groups = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self._left_alone or (groups and torch.distributed.get_world_size() > 1):
            self._leave(self._left_alone or "several processes exchange gradients behind the backward")
        elif why := why_not(optimizer)[0]:  # a hook that was registered later
            self._leave(why)
        elif others_on():
            self._leave("the script has a TorchDispatchMode around its backward")
        elif not seen:
            self._leave("the script calls torch's engine itself, not torch.autograd.backward")
        elif not self._has_stepped:
            self._has_stepped = True
            atexit.register(self._at_the_end)
        return not self._left_alone

    def _leave(self, why: str) -> None:
        """Stop stepping in backwards. If a backward has stepped already, the script's step still completes it."""
        if self._left_alone:
            return
        self._left_alone = why
        if self._stepped is not None:
            self._stepped.end()
        self.acted.pop("optimizer", None)  # it acts on none
        self.gave_up(why)

    def _at_the_end(self) -> None:
        """Warn, when the process exits, of a backward without a step."""
        if self._stepped is not None and self._stepped.pending:
            messages.tell(
                "hasten: optimizer_in_backward: the last backward had no step after it, and was stepped: weights that "
                "were saved since have taken a step that the script never made"
            )
