"""`self.log` in each hook: where it may be called, and where it says that it may not."""

import pytest
import torch

from hasten import HastenError
from hasten.callbacks import Callback
from tests.trainer.test_log import Logging, fitted, numbers, values
from tests.trainer.trainings import quiet

BY_STEP = [
    "training_step", "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "optimizer_step", "optimizer_zero_grad", "backward",
    "configure_gradient_clipping",
]  # fmt: skip
BY_EPOCH = ["on_train_start", "on_train_epoch_start", "on_train_epoch_end"]
NOWHERE = [
    "on_fit_start",
    "on_fit_end",
    "on_train_end",
    "setup",
    "teardown",
    "configure_optimizers",
    "on_validation_end",
]


@pytest.mark.parametrize("hook", [*BY_STEP, *BY_EPOCH])
def test_hooks_of_training_that_may_log(hook):
    trainer = fitted(("x", 3.0, {}), hook=hook)
    assert float(trainer.callback_metrics["x"]) == 3.0
    trainer = fitted(("x", 3.0, {"on_step": False, "on_epoch": True}), hook=hook)
    assert float(trainer.callback_metrics["x"]) == 3.0


@pytest.mark.parametrize(
    "hook",
    ["validation_step", "on_validation_batch_start", "on_validation_batch_end", "on_validation_start",
     "on_validation_epoch_start", "on_validation_epoch_end"],
)  # fmt: skip
def test_hooks_of_evaluation_that_may_log(hook):
    trainer = fitted(("x", 3.0, {"batch_size": 1}), hook=hook, validation=numbers())
    assert float(trainer.callback_metrics["x"]) == 3.0
    module = Logging(**{hook.replace("validation", "test"): [("x", 3.0, {"batch_size": 1})]})
    assert quiet().test(module, numbers(), verbose=False) == [{"x": 3.0}]


@pytest.mark.parametrize("hook", NOWHERE)
def test_hooks_that_may_not_log_say_so(hook):
    with pytest.raises(HastenError, match=hook):
        fitted(("x", 3.0, {}), hook=hook, validation=numbers())


@pytest.mark.parametrize("hook", BY_EPOCH)
def test_hooks_between_steps_log_by_epoch_only(hook):
    with pytest.raises(HastenError, match=r"on_step=True"):
        fitted(("x", 3.0, {"on_step": True}), hook=hook)


def test_callbacks_log_too():
    class Says(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            module.log("from_callback", float(batch_idx), on_epoch=True, on_step=False, reduce_fx="max")

        def on_train_epoch_end(self, trainer, module):
            module.log("at_the_end", 7.0)

    trainer = fitted(callbacks=Says())
    assert values(trainer.callback_metrics) == {"from_callback": 2.0, "at_the_end": 7.0}


def test_logging_without_a_trainer_does_nothing_and_in_predict_is_refused():
    module = Logging(training_step=[("x", 3.0, {})])
    module.training_step(torch.zeros(2), 0)

    class Predicts(Logging):
        def predict_step(self, batch, batch_idx):
            self.log("x", 1.0)

    with pytest.raises(HastenError, match="x"):
        quiet().predict(Predicts(), numbers())
