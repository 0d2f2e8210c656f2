"""Callback: what a person overrides to take part in a training."""

from __future__ import annotations

from typing import Any


class Callback:
    """Takes part in a training by overriding some of the hooks below; all of them do nothing.

    The Trainer looks once, at set-up, which hooks a callback overrides, and calls only those: a hook that is not
    overridden costs nothing per step. Names, arguments and order are those that people know. `trainer` is the
    `hasten.Trainer`, `module` what it trains.

    Attributes:
        skip_batches: None: `on_train_batch_end` is called for every batch. A number: how many of its coming calls this
            callback can do without. The loop may leave that many out, but calls for the last batch of an epoch where
            it knows which one that is. A callback must not rely on being left out.
    """

    skip_batches: int | None = None

    def needs(self, hook: str) -> bool:
        """Whether, by its settings, this callback has anything to do in a hook it overrides.

        The Trainer asks once, when a run begins, after `setup`; no means the hook is not called in this run.
        """
        return True

    @property
    def state_key(self) -> str:
        """Where `checkpoint["callbacks"]` keeps this callback's state; one that may be used twice makes it unique."""
        return type(self).__qualname__

    def _generate_state_key(self, **kwargs: Any) -> str:
        """A state key that tells apart callbacks of one class by how they were built."""
        return f"{type(self).__qualname__}{kwargs!r}"

    def state_dict(self) -> dict[str, Any]:
        """State to be saved: plain values and tensors only."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """A run begins. `stage`: fit, validate, test or predict."""

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """A run has ended."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """`fit` begins; the model is on its device."""

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        """`fit` has ended."""

    def on_sanity_check_start(self, trainer: Any, module: Any) -> None:
        """The few validation batches before training begin."""

    def on_sanity_check_end(self, trainer: Any, module: Any) -> None:
        """The few validation batches before training are over."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Training begins."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Training has ended."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """A pass through the training data begins."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """A pass through the training data, with the validation that belongs to it, is over."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
        """A training batch is on the device; -1 ends the epoch."""
        return None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A training batch is done. `outputs` is what `training_step` gave; its loss is unread."""

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Gradients are about to be cleared."""

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        """`loss.backward()` comes next."""

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        """`loss.backward()` is done; the optimizer has not stepped."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Gradients are complete, not yet clipped; `optimizer.step()` comes next."""

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Validation begins."""

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Validation is over."""

    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        """A pass through the validation data begins."""

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        """A pass through the validation data is over."""

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A validation batch is on the device."""

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A validation batch is done."""

    def on_test_start(self, trainer: Any, module: Any) -> None:
        """Testing begins."""

    def on_test_end(self, trainer: Any, module: Any) -> None:
        """Testing is over."""

    def on_test_epoch_start(self, trainer: Any, module: Any) -> None:
        """A pass through the test data begins."""

    def on_test_epoch_end(self, trainer: Any, module: Any) -> None:
        """A pass through the test data is over."""

    def on_test_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A test batch is on the device."""

    def on_test_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A test batch is done."""

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        """Prediction begins."""

    def on_predict_end(self, trainer: Any, module: Any) -> None:
        """Prediction is over."""

    def on_predict_epoch_start(self, trainer: Any, module: Any) -> None:
        """A pass through the prediction data begins."""

    def on_predict_epoch_end(self, trainer: Any, module: Any) -> None:
        """A pass through the prediction data is over."""

    def on_predict_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A prediction batch is on the device."""

    def on_predict_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A prediction batch is done."""

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """An exception, also KeyboardInterrupt, ends the run."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is about to be written; it may be added to or changed."""

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint was read, to go on from it."""


def callbacks_named(callbacks: list[Any], *names: str) -> list[Any]:
    """Return the callbacks that are of one of these classes, of whatever framework."""
    return [callback for callback in callbacks if any(kind.__name__ in names for kind in type(callback).__mro__)]


def state_key(callback: Any) -> str:
    """Return the name under which checkpoints hold a callback's state; a callback may be any object with hooks."""
    return str(getattr(callback, "state_key", type(callback).__qualname__))
