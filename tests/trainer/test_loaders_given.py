"""What a Trainer says about loaders that are none, and when it asks for them."""

import logging

import pytest
import torch

from hasten import HastenError
from hasten.callbacks import Callback
from tests.trainer.trainings import Regression, loader, quiet


class Own(Regression):
    """A module that brings its loaders, and notes when it is asked for them."""

    def __init__(self, given=None, seen=None, **options):
        super().__init__(**options)
        self.given = given
        self.seen = [] if seen is None else seen

    def train_dataloader(self):
        self.seen.append("train_dataloader")
        return self.given or loader()

    def val_dataloader(self):
        self.seen.append("val_dataloader")
        return self.given or loader()


@pytest.mark.parametrize("wrong", [3, [loader(), 3]])
@pytest.mark.parametrize(
    ("fn", "argument"),
    [
        ("fit", "train_dataloaders"),
        ("fit", "val_dataloaders"),
        ("validate", "dataloaders"),
        ("test", "dataloaders"),
        ("predict", "dataloaders"),
    ],
)
def test_a_thing_that_is_no_loader_is_refused_with_where_it_was_given(fn, argument, wrong):
    loaders = {argument: wrong} if argument != "val_dataloaders" else {"train_dataloaders": loader(), argument: wrong}
    with pytest.raises(TypeError, match=rf"passed to `Trainer.{fn}\({argument}=...\)`: 3") as caught:
        getattr(quiet(), fn)(Regression(), **loaders)
    assert isinstance(caught.value, HastenError)


def test_a_thing_that_is_no_loader_is_refused_with_the_method_that_gave_it():
    with pytest.raises(TypeError, match=r"returned from `Own.train_dataloader\(\)`: 3"):
        quiet(limit_val_batches=0).fit(Own(given=3))


@pytest.mark.parametrize("fn", ["fit", "validate", "test", "predict"])
def test_no_loader_at_all_is_refused(fn):
    with pytest.raises(TypeError, match=f"passed to `Trainer.{fn}"):
        getattr(quiet(), fn)(Regression())


def test_the_sanity_check_begins_before_its_loaders_are_asked_for_and_the_first_validation_uses_them():
    seen = []

    class Notes(Callback):
        def on_sanity_check_start(self, trainer, module):
            seen.append("on_sanity_check_start")

        def on_train_start(self, trainer, module):
            seen.append("on_train_start")

    quiet(callbacks=[Notes()], reload_dataloaders_every_n_epochs=1).fit(Own(seen=seen))
    assert seen == ["on_sanity_check_start", "val_dataloader", "train_dataloader", "on_train_start"]


def test_a_module_without_validation_loaders_has_no_sanity_check():
    class Fails(Callback):
        def on_sanity_check_start(self, trainer, module):
            raise AssertionError

    with pytest.warns(UserWarning, match="no `val_dataloader`"):
        quiet(callbacks=[Fails()]).fit(Regression(), loader())


def test_hooks_see_the_gradients_of_a_closure_in_manual_optimization():
    seen = []

    class Manual(Regression):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = super(Manual, self).training_step(batch, batch_idx)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)

        def on_before_optimizer_step(self, optimizer):
            seen.append(self.net[0].weight.grad is not None)

    quiet(limit_train_batches=2).fit(Manual(), loader())
    assert seen == [True, True]


def test_modules_made_under_init_module_have_the_precision():
    with quiet(precision="64-true").init_module():
        assert torch.nn.Linear(1, 1).weight.dtype == torch.float64
    assert torch.nn.Linear(1, 1).weight.dtype == torch.float32


def test_one_and_all_are_told_apart_through_logging_where_it_is_set_up(caplog, capsys):
    quiet(limit_train_batches=1)
    assert "limit_train_batches=1)` was configured so 1 batch will be used" in capsys.readouterr().err
    with caplog.at_level(logging.INFO):
        quiet(limit_train_batches=1.0)
    assert "limit_train_batches=1.0)` was configured so 100% of the batches will be used" in caplog.text
    assert not capsys.readouterr().err


def test_the_last_steps_values_are_there_after_fit():
    trainer = quiet()
    with pytest.warns(UserWarning, match="no `val_dataloader`"):
        trainer.fit(Regression(log=True), loader())
    assert trainer.callback_metrics["loss"] > 0
