"""Hooks of modules, callbacks and datamodules: which are defined, and in which order they are called.

A hook that nobody overrides is never called. `Hooks` collects the defined ones when a run begins, callbacks first, then
the module, and wraps them so that `self.log` knows which hook it is called in, and the profiler times them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hasten.trainer.adapter import adapter
from hasten.trainer.callbacks.base import Callback, state_key

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer

Hook = Callable[..., Any]


class ModuleHooks:
    """The hooks that a module may define. They do nothing; a hook that is not overridden is never called."""

    def prepare_data(self) -> None:
        """Download or unpack data; called on one process per machine, or on rank 0 only."""

    def setup(self, stage: str) -> None:
        """Build datasets, or layers that depend on them; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Clean up at the end of the stage."""

    def on_fit_start(self) -> None:
        """Called when `fit` begins, after the optimizers are built."""

    def on_fit_end(self) -> None:
        """Called when `fit` is over."""

    def on_train_start(self) -> None:
        """Called before the first epoch."""

    def on_train_end(self) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Called before an epoch's first batch."""

    def on_train_epoch_end(self) -> None:
        """Called after an epoch's last batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Called before a batch's step; return -1 to skip the rest of the epoch."""
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a batch's step."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        """Called before gradients are cleared."""

    def on_before_backward(self, loss: Any) -> None:
        """Called before the backward pass."""

    def on_after_backward(self) -> None:
        """Called after the backward pass; gradients are not clipped yet."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Called before the optimizer steps; gradients are not clipped yet."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch to use, before it is copied to the device."""
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch to use, after it was copied to the device."""
        return batch

    def split_batch(self, batch: Any, size: int) -> list[Any]:
        """Return a batch in parts of `size` samples; used by the flag `microbatch`. Default: split dimension 0."""
        raise NotImplementedError

    def loss_terms(self, batch: Any) -> int:
        """Return the number of terms that a batch's loss is the mean of; used by `microbatch`. Default: the samples."""
        raise NotImplementedError

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add entries to a checkpoint that is about to be written."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read from a checkpoint the entries that `on_save_checkpoint` added."""

    def on_validation_start(self) -> None:
        """Called when a validation begins."""

    def on_validation_end(self) -> None:
        """Called when a validation is over."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last validation batch."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a batch's step."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a batch's step."""

    def on_test_start(self) -> None:
        """Called when a test begins."""

    def on_test_end(self) -> None:
        """Called when a test is over."""

    def on_test_epoch_start(self) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Called after the last test batch."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a batch's step."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a batch's step."""

    def on_predict_start(self) -> None:
        """Called when a prediction begins."""

    def on_predict_end(self) -> None:
        """Called when a prediction is over."""

    def on_predict_epoch_start(self) -> None:
        """Called before the first prediction batch."""

    def on_predict_epoch_end(self) -> None:
        """Called after the last prediction batch."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a batch's step."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a batch's step."""


def overridden(owner: Any, name: str, *bases: type, through_wrappers: bool = False) -> bool:
    """Return whether an object defines a method itself, instead of inheriting it from one of the `bases`.

    An instance attribute counts: people and mocks replace the method of one object that way.

    Args:
        owner: The object.
        name: The method's name.
        bases: Classes whose methods are defaults.
        through_wrappers: Whether a default inside a wrapper (`functools.wraps`) still counts as the default.
    """
    method = getattr(owner, name, None)
    if method is None or not callable(method):
        return False
    if through_wrappers:
        method = inspect.unwrap(method)
    if isinstance(method, functools.partial):
        method = method.func
    function = inspect.unwrap(getattr(method, "__func__", method))
    for base in bases:
        if isinstance(owner, base) and (default := getattr(base, name, None)) is not None:
            return function is not inspect.unwrap(default)
    return True


class Hooks:
    """The hooks that are defined, ready to be called.

    Args:
        trainer: The Trainer, with its callbacks and its datamodule.
        module: The model.
        module_bases: Classes whose methods are the defaults of modules.
        callback_bases: The same for callbacks.
        datamodule_bases: The same for datamodules.
        wrap: `wrap(label, hook)` returns the hook to call in its place, timed by a profiler; None: no wrapper.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: Any,
        module_bases: tuple[type, ...],
        callback_bases: tuple[type, ...],
        datamodule_bases: tuple[type, ...],
        wrap: Callable[[str, Hook], Hook] | None = None,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._bases = module_bases, callback_bases, datamodule_bases
        self._wrap = wrap

    def of_module(self, name: str) -> Hook | None:
        """Return the module's own method, or None if it defines none."""
        if not overridden(self._module, name, *self._bases[0]):
            return None
        label = f"[{adapter().owners[0]}]{type(self._module).__name__}.{name}"
        return self._named(name, self._wrapped(label, getattr(self._module, name)))

    def of_datamodule(self, name: str) -> Hook | None:
        """Return the datamodule's own method, or None."""
        datamodule = self._trainer.datamodule
        if datamodule is None or not overridden(datamodule, name, *self._bases[2]):
            return None
        return self._wrapped(f"[{adapter().owners[1]}]{type(datamodule).__name__}.{name}", getattr(datamodule, name))

    def of_data(self, name: str) -> Hook | None:
        """Return a data hook: the datamodule's if it defines it, else the module's, or None."""
        of_datamodule = self.owner_of_data(name) is not self._module
        return self.of_datamodule(name) if of_datamodule else self.of_module(name)

    def owner_of_data(self, name: str) -> Any:
        """Return the object whose data hook is used: the datamodule if it defines the hook, else the module."""
        datamodule = self._trainer.datamodule
        return datamodule if overridden(datamodule, name, *self._bases[2], through_wrappers=True) else self._module

    def of_callbacks(self, name: str, monitoring: bool | None = None, among: list[Any] | None = None) -> list[Hook]:
        """Return the callbacks' methods, bound to trainer and module.

        Args:
            name: The hook.
            monitoring: Only callbacks with a `monitor` attribute (True), or only the others (False).
            among: The callbacks to look at; default: all.
        """
        methods = []
        for callback in self._trainer.callbacks if among is None else among:
            if monitoring is not None and monitoring != hasattr(callback, "monitor"):
                continue
            if not overridden(callback, name, *self._bases[1]):
                continue
            if isinstance(callback, Callback) and not callback.needs(name):
                continue
            method: Hook = functools.partial(getattr(callback, name), self._trainer, self._module)
            methods.append(self._named(name, self._wrapped(f"[Callback]{state_key(callback)}.{name}", method)))
        return methods

    def _wrapped(self, label: str, method: Hook) -> Hook:
        return method if self._wrap is None else self._wrap(label, method)

    def _named(self, name: str, method: Hook) -> Hook:
        """Wrap a hook so that `self.log`, called in it, knows the hook's name."""
        names = self._module.__dict__

        def hook(*args: Any, **kwargs: Any) -> Any:
            before = names.get("_current_fx_name")
            names["_current_fx_name"] = name
            try:
                return method(*args, **kwargs)
            finally:
                names["_current_fx_name"] = before

        return hook

    def at_batch_end(self, adapt: Callable[[Hook], Hook]) -> tuple[list[tuple[Callback, Hook]], list[Hook]]:
        """Return the hooks for the end of a training batch: of callbacks that may skip batches, and of all others.

        Args:
            adapt: Wraps each hook for the loop (see `DataLoaderIterator.with_last_batch`).
        """
        name = "on_train_batch_end"
        skipping = [
            callback for callback in self._trainer.callbacks if getattr(callback, "skip_batches", None) is not None
        ]
        every_batch = [
            callback for callback in self._trainer.callbacks if not any(callback is skipper for skipper in skipping)
        ]
        module_hook = self.of_module(name)
        skipping_hooks = [
            (callback, hook) for callback in skipping for hook in self.adapted_callbacks(name, adapt, [callback])
        ]
        return skipping_hooks, self.adapted_callbacks(name, adapt, every_batch) + (
            [adapt(module_hook)] if module_hook else []
        )

    def adapted_callbacks(self, name: str, adapt: Callable[[Hook], Hook], among: list[Any] | None = None) -> list[Hook]:
        """Return the callbacks' methods, wrapped by `adapt`, except those of hasten: these count the loop's batches."""
        adapted: list[Hook] = []
        for callback in self._trainer.callbacks if among is None else among:
            methods = self.of_callbacks(name, among=[callback])
            adapted += methods if type(callback).__module__.startswith("hasten.") else map(adapt, methods)
        return adapted

    def of(self, name: str) -> list[Hook]:
        """Return all definitions of a hook: callbacks first, then the module."""
        module_hook = self.of_module(name)
        return self.of_callbacks(name) + ([module_hook] if module_hook else [])

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call all definitions of a hook; return the module's result."""
        answer = None
        for hook in self.of_callbacks(name):
            hook(*args, **kwargs)
        if (module_hook := self.of_module(name)) is not None:
            answer = module_hook(*args, **kwargs)
        return answer
