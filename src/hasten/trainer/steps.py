"""Builds the training step once, at set-up, from what is in use: an unused hook or technique costs nothing per step.

A step is `step(batch, batch_idx, first, last)`, where `first` and `last` tell whether the batch opens or closes its
accumulation window. It differentiates the batch; in a window's last batch it then prepares (hooks, clipping) and steps
the optimizer. An optimizer such as LBFGS, or a module's own `optimizer_step`, gets the first two parts as a closure.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hasten.trainer.in_backward import step_in_backward
from hasten.trainer.microbatch import in_parts
from hasten.trainer.outputs import loss_of, scaled_loss
from hasten.trainer.profiling import measures, profiled

if TYPE_CHECKING:
    from hasten.trainer.hooks import Hooks
    from hasten.trainer.trainer import Trainer

Step = Callable[[Any, int, bool, bool], Any]
"""`(batch, batch_idx, first, last)` -> the output of training_step; first and last in the accumulation window."""

Differentiate = Callable[[Any, int, bool], Any]
"""`(batch, batch_idx, first)` -> the output of training_step, with gradients computed; first in the window."""


def takes_batch_idx(method: Any) -> bool:
    """Return whether a step method takes `batch_idx` besides the batch."""
    parameters = list(inspect.signature(method).parameters.values())
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return True
    return len(parameters) >= 2 or any(p.name == "batch_idx" for p in parameters)


def wrap_step_method(trainer: Trainer, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a step method of the module in what changes its forward: the strategy (DDP), the profiler and techniques."""
    engine = trainer.engine
    module, run = engine.model, engine.run
    if name == "training_step":
        strategy = engine.strategy
        step = strategy.training_step if module.automatic_optimization else strategy.manual_step
        method = step(method)
    else:
        method = engine.strategy.evaluation_step(method)
    if measures(trainer.profiler):
        method = profiled(trainer.profiler, f"[Strategy]{engine.strategy.label}Strategy.{name}", method)
    if run.techniques_at("forward"):
        # Techniques (autocast, for example) wrap the whole step, as they wrap `model(...)` in an unmodified script.

        def plain(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return method(*args, **kwargs)

        wrapped = run.wrap("forward", plain)
        return lambda *args: wrapped(module, args, {})
    return method


def _clearing(trainer: Trainer, hooks: Hooks, optimizer: Any) -> Callable[[int], None]:
    """Return a function that clears gradients at the start of an accumulation window, as cheaply as possible."""
    before, override = hooks.of("on_before_zero_grad"), hooks.of_module("optimizer_zero_grad")
    # torch's own `zero_grad` wraps its loop in a profiler range each time, so `clear` inlines the loop. An override, in
    # a subclass or set on the object, is called.
    inherited = getattr(type(optimizer), "zero_grad", None) is torch.optim.Optimizer.zero_grad
    plain = inherited and "zero_grad" not in vars(optimizer)

    def clear(batch_idx: int) -> None:
        for hook in before:
            hook(optimizer)
        if override is not None:
            override(trainer.progress.current_epoch, batch_idx, optimizer)
        elif plain:
            for group in optimizer.param_groups:  # read each time: a callback may have changed them
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            optimizer.zero_grad()

    return clear


def automatic(trainer: Trainer, hooks: Hooks) -> Step:
    """Return the step of a module with automatic optimization: the Trainer runs backward and steps the optimizer."""
    engine, progress, module = trainer.engine, trainer.progress, trainer.model
    optimizing = engine.optimizing
    optimizer = optimizing.optimizers[0]
    training_step = wrap_step_method(trainer, "training_step", module.training_step)
    if not takes_batch_idx(module.training_step):
        takes_batch = training_step
        training_step = lambda batch, batch_idx: takes_batch(batch)  # noqa: E731
    clear = _clearing(trainer, hooks, optimizer)
    backward = backward_of(trainer, hooks)
    if trainer.config.optimizer_in_backward:  # the backward steps parameters; `optimizer.step()` finds no gradients
        optimizing.in_backward, backward = step_in_backward(trainer, hooks, optimizer, backward)
    prepare = optimizing.prepare = preparation(trainer, hooks, optimizer)
    own_step = hooks.of_module("optimizer_step")
    names = module.__dict__
    sync = engine.strategy.syncing()
    tensor = torch.Tensor

    def whole_batch(batch: Any, batch_idx: int, first: bool) -> Any:
        output = training_step(batch, batch_idx)
        loss = output if isinstance(output, tensor) else loss_of(output)
        every = trainer.config.accumulate_grad_batches
        if every != 1 and loss is not None:
            loss = loss / every  # so that the window's gradient is a mean over its batches, not a sum
        if optimizing.skips_backward:  # stochastic weight averaging only updates BatchNorm in its last epoch
            return output
        if first:
            clear(batch_idx)
        if loss is not None:
            backward(loss)
        return output

    differentiate: Differentiate = whole_batch
    if engine.strategy.differentiates:
        differentiate = differentiated_within(trainer, hooks, training_step, clear)
    if trainer.config.microbatch is not None:
        differentiate = in_parts(trainer, hooks, training_step, clear, backward)

    def step(batch: Any, batch_idx: int, first: bool, last: bool) -> Any:
        names["_current_fx_name"] = "training_step"
        if sync is not None:
            sync(last)  # under DDP, ranks exchange gradients in a window's last batch only
        if not last:
            return differentiate(batch, batch_idx, first)
        if with_closure is not None:
            return with_closure(batch, batch_idx, first)
        outputs = differentiate(batch, batch_idx, first)
        prepare()
        optimizer.step()
        progress.global_step += 1
        return outputs

    by_closure = own_step is not None or needs_closure(optimizer)
    with_closure = stepping_by_closure(trainer, differentiate, own_step) if by_closure else None
    return step


def differentiated_within(
    trainer: Trainer, hooks: Hooks, training_step: Callable[..., Any], clear: Callable[[int], None]
) -> Differentiate:
    """Return the function that computes a batch's gradients when `training_step` runs the backward too (a pipeline).

    Raises:
        HastenError: A hook of the module needs to run between forward and backward.
    """
    for name in ("on_before_backward", "backward"):
        if hooks.of_module(name) is not None:
            raise trainer.misconfigured(
                f"{trainer.engine.strategy.label}Strategy runs forwards and backwards of a batch's parts in turn:"
                f" {name} could not be called between them",
                "leave this hook out",
            )
    # Callbacks such as NaNWatch only read the loss, so they may be called when the backward is over.
    before, after = hooks.of_callbacks("on_before_backward"), hooks.of("on_after_backward")

    def differentiate(batch: Any, batch_idx: int, first: bool) -> Any:
        if trainer.engine.optimizing.skips_backward:
            raise trainer.misconfigured(
                f"{trainer.engine.strategy.label}Strategy cannot leave the backward out, as stochastic weight averaging"
                " does at its end",
                "use the callback EMA",
            )
        if first:
            clear(batch_idx)
        output = training_step(batch, batch_idx)
        for hook in before:
            hook(output)
        for hook in after:
            hook()
        return output

    return differentiate


def stepping_by_closure(
    trainer: Trainer, differentiate: Differentiate, own_step: Callable[..., Any] | None
) -> Callable[[Any, int, bool], Any]:
    """Return the step for a window's last batch when the optimizer, or `optimizer_step`, evaluates the model itself."""
    progress, optimizing, names = trainer.progress, trainer.engine.optimizing, trainer.model.__dict__
    optimizer, prepare = optimizing.optimizers[0], optimizing.prepare

    def step(batch: Any, batch_idx: int, first: bool) -> Any:
        last_output: list[Any] = [None]
        evaluated: list[bool] = []

        @torch.enable_grad()  # some optimizers call the closure under no_grad
        def closure() -> Any:
            names["_current_fx_name"] = "training_step"
            # LBFGS calls this several times per step: each evaluation after the first starts from cleared gradients.
            last_output[0] = differentiate(batch, batch_idx, first or bool(evaluated))
            evaluated.append(True)
            if own_step is None:
                prepare()  # otherwise CountedOptimizer does: optimizer_step may call this closure itself, then step()
            return scaled_loss(last_output[0], trainer.config.accumulate_grad_batches)

        if own_step is not None:
            own_step(progress.current_epoch, batch_idx, optimizing.counted[0], closure)
        else:
            optimizer.step(closure=closure)
        progress.global_step += 1
        if not evaluated:
            raise trainer.misconfigured(
                "The closure hasn't been executed by the step of the optimizer, so nothing was trained",
                "in optimizer_step call optimizer.step(closure=optimizer_closure); an optimizer's step has to call it",
            )
        return last_output[0]

    return step


def preparation(trainer: Trainer, hooks: Hooks, optimizer: Any) -> Callable[[], None]:
    """Return the function that runs between backward and step: hooks, then clipping."""
    before_step = hooks.of("on_before_optimizer_step")
    own_clipping = hooks.of_module("configure_gradient_clipping")
    clips, clip = bool(trainer.config.gradient_clip_val), trainer.engine.strategy.clip
    check_exchange = trainer.engine.strategy.check_exchange()

    def prepare() -> None:
        if check_exchange is not None:
            check_exchange()
        for hook in before_step:
            hook(optimizer)
        if own_clipping is not None:
            config = trainer.config
            own_clipping(
                optimizer,
                gradient_clip_val=config.gradient_clip_val,
                gradient_clip_algorithm=config.gradient_clip_algorithm,
            )
        elif clips:
            clip(optimizer, trainer.config.gradient_clip_val, trainer.config.gradient_clip_algorithm or "norm")

    return prepare


def manual(trainer: Trainer, hooks: Hooks) -> Step:
    """Return the step of a module with manual optimization, which steps its optimizers itself."""
    module = trainer.model
    training_step = wrap_step_method(trainer, "training_step", module.training_step)
    if not takes_batch_idx(module.training_step):
        takes_batch = training_step
        training_step = lambda batch, batch_idx: takes_batch(batch)  # noqa: E731
    names = module.__dict__

    def step(batch: Any, batch_idx: int, first: bool, last: bool) -> Any:
        names["_current_fx_name"] = "training_step"
        output = training_step(batch, batch_idx)
        if output is None or isinstance(output, torch.Tensor | Mapping):
            return output
        raise trainer.misconfigured(
            f"training_step gave a {type(output).__name__}: in manual optimization it must return a Tensor or have no"
            " return, or return a dict"
        )

    return step


def needs_closure(optimizer: Any) -> bool:
    """Return whether an optimizer may evaluate the model itself: LBFGS, and any optimizer that is not torch's."""
    kind = type(optimizer)
    return isinstance(optimizer, torch.optim.LBFGS) or not kind.__module__.startswith("torch.optim")


def backward_of(trainer: Trainer, hooks: Hooks) -> Callable[..., None]:
    """Return `backward(loss)` with hooks, the module's own `backward` if it defines one, and techniques."""
    before, after = hooks.of("on_before_backward"), hooks.of("on_after_backward")
    override = hooks.of_module("backward")
    run = trainer.engine.run
    plain: Callable[..., Any]
    if override is not None:
        plain = (
            through_techniques(run.wrap("backward", torch.autograd.backward), override)
            if run.techniques_at("backward")
            else override
        )
    elif run.techniques_at("backward"):
        plain = run.wrap("backward", torch.autograd.backward)
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


def through_techniques(wrapped: Callable[..., None], override: Callable[..., None]) -> Callable[..., None]:
    """Wrap a module's own `backward` so that the `loss.backward()` in it passes through the techniques.

    `Tensor.backward` looks `torch.autograd.backward` up at each call, so that name is replaced for the call.
    """

    def backward(*args: Any, **kwargs: Any) -> None:
        plain = torch.autograd.backward
        torch.autograd.backward = wrapped
        try:
            override(*args, **kwargs)
        finally:
            torch.autograd.backward = plain

    return backward


class CountedOptimizer:
    """Wrapper of an optimizer whose steps the Trainer counts; `Module.optimizers()` and `optimizer_step` get it."""

    def __init__(self, optimizer: Any, trainer: Trainer, before: list[Any]) -> None:
        self.optimizer = optimizer
        self._trainer = trainer
        self._before = before

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Call hooks and clipping, then step the optimizer; in manual optimization, count the step."""
        automatic = self._trainer.model.automatic_optimization
        prepare: Callable[[], None] = self._trainer.engine.optimizing.prepare if automatic else self._call_hooks
        if closure is None:
            prepare()
            answer = self.optimizer.step(**kwargs)
        else:
            answer = self.optimizer.step(closure=_followed_by(closure, prepare), **kwargs)
        if not automatic:
            self._trainer.progress.global_step += 1
        return answer

    def _call_hooks(self) -> None:
        for hook in self._before:
            hook(self.optimizer)


def _followed_by(closure: Callable[[], Any], prepare: Callable[[], None]) -> Callable[[], Any]:
    """Return a closure that calls `prepare` after computing gradients, before the optimizer uses them."""

    @torch.enable_grad()
    def closed() -> Any:
        answer = closure()
        prepare()
        return answer

    return closed
