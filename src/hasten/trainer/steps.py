"""One training step, put together once at set-up: only what is installed runs in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hasten.trainer.optimizing import clip

if TYPE_CHECKING:
    from hasten.trainer.hooks import Hooks
    from hasten.trainer.trainer import Trainer

Step = Callable[[Any, int, bool, bool], Any]
"""`(batch, batch_idx, first, last)` of an accumulation window -> what the hooks get as `outputs`."""


def takes_batch_idx(method: Any) -> bool:
    """Whether a step method takes more than the batch."""
    parameters = list(inspect.signature(method).parameters.values())
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return True
    return len(parameters) >= 2 or any(p.name == "batch_idx" for p in parameters)


def called(trainer: Trainer, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A step method of the module behind what changes its forward: techniques, and DDP in training."""
    module, run = trainer.model, trainer.run
    if name == "training_step" and trainer.distributed is not None:
        method = trainer.distributed
    if run.acting("forward"):

        def plain(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return method(*args, **kwargs)

        wrapped = run.wrapped("forward", plain)
        return lambda *args: wrapped(module, args, {})
    return method


class Window:
    """Clears gradients at the start of an accumulation window, as cheaply as the optimizer allows."""

    def __init__(self, trainer: Trainer, hooks: Hooks, optimizer: Any) -> None:
        self._trainer = trainer
        self._optimizer = optimizer
        self._before = hooks.of("on_before_zero_grad")
        self._own = hooks.of_module("optimizer_zero_grad")
        plain = getattr(type(optimizer), "zero_grad", None) is torch.optim.Optimizer.zero_grad
        self._plain = plain and "zero_grad" not in vars(optimizer)
        self._groups = -1
        self._parameters: list[Any] = []

    def clear(self, batch_idx: int) -> None:
        """Drop the gradients of the step before."""
        for hook in self._before:
            hook(self._optimizer)
        if self._own is not None:
            self._own(self._trainer.current_epoch, batch_idx, self._optimizer)
        elif self._plain:
            groups = self._optimizer.param_groups
            if len(groups) != self._groups:  # the list of parameters is made once; groups may join later
                self._groups = len(groups)
                self._parameters = [p for group in groups for p in group["params"]]
            for parameter in self._parameters:
                parameter.grad = None
        else:
            self._optimizer.zero_grad()


def automatic(trainer: Trainer, hooks: Hooks) -> Step:
    """The step of a module that leaves optimizing to the Trainer."""
    module = trainer.model
    optimizer = trainer.optimizers[0]
    training_step = called(trainer, "training_step", module.training_step)
    if not takes_batch_idx(module.training_step):
        takes_batch = training_step
        training_step = lambda batch, batch_idx: takes_batch(batch)  # noqa: E731
    window = Window(trainer, hooks, optimizer)
    clear = window.clear
    backward = backward_of(trainer, hooks)
    before_step = hooks.of("on_before_optimizer_step")
    own_clipping = hooks.of_module("configure_gradient_clipping")
    clips = bool(trainer.gradient_clip_val) and own_clipping is None
    own_step = hooks.of_module("optimizer_step")
    by_closure = own_step is None and needs_closure(optimizer)
    wants_outputs = bool(hooks.of("on_train_batch_end"))
    names = module.__dict__
    distributed = trainer.distributed
    tensor = torch.Tensor

    def differentiate(batch: Any, batch_idx: int, first: bool) -> Any:
        output = training_step(batch, batch_idx)
        loss = output if isinstance(output, tensor) else loss_of(output)
        if trainer.accumulate_grad_batches != 1 and loss is not None:
            loss = loss / trainer.accumulate_grad_batches
        if trainer.skip_backward:  # stochastic weight averaging only updates BatchNorm in its last epoch
            return output if loss is None or not wants_outputs else outputs_of(output, loss)
        if first:
            clear(batch_idx)
        if loss is not None:
            backward(loss)
        return output if loss is None or not wants_outputs else outputs_of(output, loss)

    def prepare() -> None:
        for hook in before_step:
            hook(optimizer)
        if own_clipping is not None:
            own_clipping(optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        elif clips:
            clip(optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm or "norm")

    def step(batch: Any, batch_idx: int, first: bool, last: bool) -> Any:
        names["_current_fx_name"] = "training_step"
        if distributed is not None:
            distributed.require_backward_grad_sync = last
        if not last:
            return differentiate(batch, batch_idx, first)
        if own_step is None and not by_closure:
            outputs = differentiate(batch, batch_idx, first)
            prepare()
            optimizer.step()
            trainer.global_step += 1
            return outputs
        kept: list[Any] = [None]
        done: list[bool] = []

        def closure() -> Any:
            names["_current_fx_name"] = "training_step"
            kept[0] = differentiate(batch, batch_idx, first or bool(done))
            done.append(True)
            prepare()
            return loss_of(kept[0])

        if own_step is not None:
            own_step(trainer.current_epoch, batch_idx, trainer.counted_optimizers[0], closure)
        else:
            optimizer.step(closure=closure)
        trainer.global_step += 1
        if not done:
            raise trainer.misconfigured(
                "optimizer_step did not run the closure that it was given, so nothing was trained",
                "call optimizer.step(closure=optimizer_closure) in it, or optimizer_closure()",
            )
        return kept[0]

    return step


def manual(trainer: Trainer, hooks: Hooks) -> Step:
    """The step of a module that steps its optimizers itself."""
    module = trainer.model
    training_step = called(trainer, "training_step", module.training_step)
    if not takes_batch_idx(module.training_step):
        takes_batch = training_step
        training_step = lambda batch, batch_idx: takes_batch(batch)  # noqa: E731
    names = module.__dict__

    def step(batch: Any, batch_idx: int, first: bool, last: bool) -> Any:
        names["_current_fx_name"] = "training_step"
        output = training_step(batch, batch_idx)
        if isinstance(output, Mapping):
            return {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in output.items()}
        if output is None:
            return {}
        if isinstance(output, torch.Tensor):
            return {"loss": output.detach()}
        raise trainer.misconfigured(
            f"training_step of a manual optimization gave a {type(output).__name__}", "return a tensor, a dict or None"
        )

    return step


def needs_closure(optimizer: Any) -> bool:
    """Whether an optimizer evaluates the model itself: LBFGS, and those by others, which may."""
    kind = type(optimizer)
    return isinstance(optimizer, torch.optim.LBFGS) or not kind.__module__.startswith("torch.optim")


def loss_of(output: Any) -> Any:
    """The loss in what training_step gave; None skips the batch.

    Raises:
        HastenError: It is neither a tensor, nor a dict with "loss", nor None.
    """
    if output is None or isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    from hasten.trainer.flags import misconfigured

    raise misconfigured(
        f"training_step gave {'a dict without `loss`' if isinstance(output, Mapping) else type(output).__name__}",
        'return the loss tensor, a dict with "loss", or None to skip the batch',
    )


def outputs_of(output: Any, loss: torch.Tensor) -> dict[str, Any]:
    """What hooks get: the loss as it was differentiated, without its graph, and what else training_step gave."""
    extra = output if isinstance(output, Mapping) else {}
    return {"loss": loss.detach(), **{key: value for key, value in extra.items() if key != "loss"}}


def backward_of(trainer: Trainer, hooks: Hooks) -> Callable[..., None]:
    """`backward(loss)` with the hooks around it, a module's own way, and techniques."""
    before, after = hooks.of("on_before_backward"), hooks.of("on_after_backward")
    own = hooks.of_module("backward")
    run = trainer.run
    plain: Callable[..., Any]
    if own is not None:
        plain = own
    elif run.acting("backward"):
        plain = run.wrapped("backward", torch.autograd.backward)
    else:
        plain = torch.Tensor.backward
    if not before and not after:
        return plain

    def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        for hook in before:
            hook(loss)
        plain(loss, *args, **kwargs)
        for hook in after:
            hook()

    return backward


class CountedOptimizer:
    """An optimizer whose steps the Trainer counts, for manual optimization."""

    def __init__(self, optimizer: Any, trainer: Trainer, before: list[Any]) -> None:
        self.optimizer = optimizer
        self._trainer = trainer
        self._before = before

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step; in manual optimization it counts as one of the training's steps."""
        if self._trainer.model.automatic_optimization:
            return self.optimizer.step(closure=closure, **kwargs) if closure else self.optimizer.step(**kwargs)
        for hook in self._before:
            hook(self.optimizer)
        answer = self.optimizer.step(closure=closure, **kwargs) if closure else self.optimizer.step(**kwargs)
        self._trainer.global_step += 1
        return answer
