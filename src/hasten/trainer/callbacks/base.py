"""Callback: the base class whose hooks a user overrides to take part in a training."""

from __future__ import annotations

from typing import Any


class Callback:
    """Base class of callbacks: override some of the hooks below. Every hook does nothing by default.

    When a run is set up, the Trainer looks once at which hooks a callback overrides and calls only those: a hook that
    is not overridden costs nothing per step. Names, arguments and order of the hooks are those that users of other
    trainers know. `trainer` is the `hasten.Trainer`, `module` is the module that it trains.

    Attributes:
        skip_batches: None: `on_train_batch_end` is called for every batch. A number: how many of the following calls
            this callback can do without. The loop may skip up to that many, but always calls the hook for the last
            batch of an epoch where it knows which batch that is. A callback must not rely on being skipped.
    """

    skip_batches: int | None = None

    def needs(self, hook: str) -> bool:
        """Return whether this callback, with its current settings, has anything to do in a hook that it overrides.

        The Trainer asks once, when a run begins, after `setup`. If False, the hook is not called in this run.
        """
        return True

    @property
    def state_key(self) -> str:
        """The key of this callback's state in `checkpoint["callbacks"]`.

        A class whose callbacks may be used more than once in a Trainer must make it unique.
        """
        return type(self).__qualname__

    def _generate_state_key(self, **kwargs: Any) -> str:
        """Return a state key that distinguishes callbacks of one class by their arguments."""
        return f"{type(self).__qualname__}{kwargs!r}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints: plain values and tensors only."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Called when a run begins. `stage`: fit, validate, test or predict."""

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """Called when a run has ended."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Called when `fit` begins; the model is on its device."""

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        """Called when `fit` has ended."""

    def on_sanity_check_start(self, trainer: Any, module: Any) -> None:
        """Called before the few validation batches that run before training."""

    def on_sanity_check_end(self, trainer: Any, module: Any) -> None:
        """Called after the few validation batches that run before training."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Called when training begins."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Called when training has ended."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """Called when a pass through the training data begins."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Called when a pass through the training data, including its validation, is over."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
        """Called when a training batch is on the device. Return -1 to end the epoch."""
        return None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a training batch.

        `outputs` is what `training_step` returned. Its loss has not been read from the device: `.item()` waits for it.
        """

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Called before gradients are cleared."""

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        """Called before `loss.backward()`."""

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        """Called after `loss.backward()`, before the optimizer steps."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Called before `optimizer.step()`; gradients are complete but not yet clipped."""

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Called when validation begins."""

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Called when validation is over."""

    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        """Called when a pass through the validation data begins."""

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        """Called when a pass through the validation data is over."""

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called when a validation batch is on the device."""

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a validation batch."""

    def on_test_start(self, trainer: Any, module: Any) -> None:
        """Called when testing begins."""

    def on_test_end(self, trainer: Any, module: Any) -> None:
        """Called when testing is over."""

    def on_test_epoch_start(self, trainer: Any, module: Any) -> None:
        """Called when a pass through the test data begins."""

    def on_test_epoch_end(self, trainer: Any, module: Any) -> None:
        """Called when a pass through the test data is over."""

    def on_test_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called when a test batch is on the device."""

    def on_test_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a test batch."""

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        """Called when prediction begins."""

    def on_predict_end(self, trainer: Any, module: Any) -> None:
        """Called when prediction is over."""

    def on_predict_epoch_start(self, trainer: Any, module: Any) -> None:
        """Called when a pass through the prediction data begins."""

    def on_predict_epoch_end(self, trainer: Any, module: Any) -> None:
        """Called when a pass through the prediction data is over."""

    def on_predict_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called when a prediction batch is on the device."""

    def on_predict_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a prediction batch."""

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Called when an exception, including KeyboardInterrupt, ends the run."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written; the callback may add to it or change it."""

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Called after the checkpoint to resume from was read."""


def callbacks_named(callbacks: list[Any], *names: str) -> list[Any]:
    """Return the callbacks whose class, or a base class of it, has one of these names.

    By name, so that the callbacks of other frameworks match too without an import of those.
    """
    return [callback for callback in callbacks if any(kind.__name__ in names for kind in type(callback).__mro__)]


def state_key(callback: Any) -> str:
    """Return the key under which checkpoints store a callback's state.

    A callback may be any object with hooks, so it may lack `state_key`.
    """
    return str(getattr(callback, "state_key", type(callback).__qualname__))
