"""Hooks: which of them somebody defined, and in which order they are called."""

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
    """The hooks that a module may define. They do nothing, and one that is not overridden is never called."""

    def prepare_data(self) -> None:
        """Download or unpack data; in one process only."""

    def setup(self, stage: str) -> None:
        """Build datasets, or layers that depend on them; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """The stage is over."""

    def on_fit_start(self) -> None:
        """`fit` begins; optimizers are built."""

    def on_fit_end(self) -> None:
        """`fit` is over."""

    def on_train_start(self) -> None:
        """Training begins."""

    def on_train_end(self) -> None:
        """Training is over."""

    def on_train_epoch_start(self) -> None:
        """An epoch begins."""

    def on_train_epoch_end(self) -> None:
        """An epoch is over."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """A batch begins; -1 ends the epoch."""
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A batch is over."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        """Gradients are about to be cleared."""

    def on_before_backward(self, loss: Any) -> None:
        """The backward is about to begin."""

    def on_after_backward(self) -> None:
        """Gradients are there, and not clipped yet."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """The optimizer is about to step; gradients are not clipped yet."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The batch, before it goes to the device."""
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The batch, on the device."""
        return batch

    def split_batch(self, batch: Any, size: int) -> list[Any]:
        """Return a batch in parts of `size` samples; asked with the flag `microbatch`. Default: by first dimension."""
        raise NotImplementedError

    def loss_terms(self, batch: Any) -> int:
        """Return what the loss of a batch is a mean over; asked with the flag `microbatch`. Default: samples."""
        raise NotImplementedError

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint that is about to be written."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take from a checkpoint what `on_save_checkpoint` added."""

    def on_validation_start(self) -> None:
        """Validation begins."""

    def on_validation_end(self) -> None:
        """Validation is over."""

    def on_validation_epoch_start(self) -> None:
        """A pass of validation begins."""

    def on_validation_epoch_end(self) -> None:
        """A pass of validation is over."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A batch begins."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A batch is over."""

    def on_test_start(self) -> None:
        """The test begins."""

    def on_test_end(self) -> None:
        """The test is over."""

    def on_test_epoch_start(self) -> None:
        """A pass of the test begins."""

    def on_test_epoch_end(self) -> None:
        """A pass of the test is over."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A batch begins."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A batch is over."""

    def on_predict_start(self) -> None:
        """Prediction begins."""

    def on_predict_end(self) -> None:
        """Prediction is over."""

    def on_predict_epoch_start(self) -> None:
        """A pass of prediction begins."""

    def on_predict_epoch_end(self) -> None:
        """A pass of prediction is over."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A batch begins."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A batch is over."""


def overridden(owner: Any, name: str, *bases: type, through_wrappers: bool = False) -> bool:
    """Whether an object defines a method itself, rather than having it from one of the `bases`.

    An instance attribute counts: that is how people, and mocks, replace a method of one object.

    Args:
        owner: The object.
        name: The method's.
        bases: Classes whose methods are defaults.
        through_wrappers: Whether a default that somebody put a wrapper around is still a default.
    """
    found = getattr(owner, name, None)
    if found is None or not callable(found):
        return False
    if through_wrappers:
        found = inspect.unwrap(found)
    if isinstance(found, functools.partial):
        found = found.func
    function = inspect.unwrap(getattr(found, "__func__", found))
    for base in bases:
        if isinstance(owner, base) and (default := getattr(base, name, None)) is not None:
            return function is not inspect.unwrap(default)
    return True


class Hooks:
    """The hooks that somebody defined, ready to be called.

    Args:
        trainer: Whose callbacks and datamodule they are.
        module: The model.
        module_bases: Classes whose methods are defaults, of modules; the same for callbacks and datamodules.
        wrap: What each call goes through (a profiler), with its label.
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
        """The module's own method, if it defines one."""
        if not overridden(self._module, name, *self._bases[0]):
            return None
        label = f"[{adapter().owners[0]}]{type(self._module).__name__}.{name}"
        return self._named(name, self._wrapped(label, getattr(self._module, name)))

    def of_datamodule(self, name: str) -> Hook | None:
        """The datamodule's own method, if there is one."""
        datamodule = self._trainer.datamodule
        if datamodule is None or not overridden(datamodule, name, *self._bases[2]):
            return None
        return self._wrapped(f"[{adapter().owners[1]}]{type(datamodule).__name__}.{name}", getattr(datamodule, name))

    def of_data(self, name: str) -> Hook | None:
        """A data hook: the datamodule's if it defines it, else the module's."""
        of_datamodule = self.owner_of_data(name) is not self._module
        return self.of_datamodule(name) if of_datamodule else self.of_module(name)

    def owner_of_data(self, name: str) -> Any:
        """Return whose data hook is used: the datamodule, or else the module."""
        datamodule = self._trainer.datamodule
        return datamodule if overridden(datamodule, name, *self._bases[2], through_wrappers=True) else self._module

    def of_callbacks(self, name: str, monitoring: bool | None = None, among: list[Any] | None = None) -> list[Hook]:
        """The callbacks' methods, bound to trainer and module.

        Args:
            name: The hook.
            monitoring: Only those that can monitor a metric (True), or only the others (False).
            among: These callbacks; default: all.
        """
        found = []
        for callback in self._trainer.callbacks if among is None else among:
            if monitoring is not None and monitoring != hasattr(callback, "monitor"):
                continue
            if not overridden(callback, name, *self._bases[1]):
                continue
            if isinstance(callback, Callback) and not callback.needs(name):
                continue
            method: Hook = functools.partial(getattr(callback, name), self._trainer, self._module)
            found.append(self._named(name, self._wrapped(f"[Callback]{state_key(callback)}.{name}", method)))
        return found

    def _wrapped(self, label: str, method: Hook) -> Hook:
        return method if self._wrap is None else self._wrap(label, method)

    def _named(self, name: str, method: Hook) -> Hook:
        """A method under whose run `self.log` knows by whom it is called."""
        names = self._module.__dict__

        def hook(*args: Any, **kwargs: Any) -> Any:
            before = names.get("_current_fx_name")
            names["_current_fx_name"] = name
            try:
                return method(*args, **kwargs)
            finally:
                names["_current_fx_name"] = before

        return hook

    def at_batch_end(self, told: Callable[[Hook], Hook]) -> tuple[list[tuple[Callback, Hook]], list[Hook]]:
        """Return the hooks for the end of a training batch: of callbacks that may skip batches, and all others.

        Args:
            told: Makes each into what the loop calls.
        """
        name = "on_train_batch_end"
        seldom = [one for one in self._trainer.callbacks if getattr(one, "skip_batches", None) is not None]
        rest = [one for one in self._trainer.callbacks if not any(one is other for other in seldom)]
        own = self.of_module(name)
        now_and_then = [(one, hook) for one in seldom for hook in self.told_callbacks(name, told, [one])]
        return now_and_then, self.told_callbacks(name, told, rest) + ([told(own)] if own else [])

    def told_callbacks(self, name: str, told: Callable[[Hook], Hook], among: list[Any] | None = None) -> list[Hook]:
        """The callbacks' methods as the loop calls them, by `told`; hasten's own count the loop's batches."""
        found: list[Hook] = []
        for one in self._trainer.callbacks if among is None else among:
            methods = self.of_callbacks(name, among=[one])
            found += methods if type(one).__module__.startswith("hasten.") else map(told, methods)
        return found

    def of(self, name: str) -> list[Hook]:
        """All that listen to a hook: callbacks first, then the module."""
        own = self.of_module(name)
        return self.of_callbacks(name) + ([own] if own else [])

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call all that listen to a hook; the module's answer."""
        answer = None
        for hook in self.of_callbacks(name):
            hook(*args, **kwargs)
        if (own := self.of_module(name)) is not None:
            answer = own(*args, **kwargs)
        return answer
