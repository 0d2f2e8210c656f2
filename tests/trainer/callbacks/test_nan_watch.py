"""NaNWatch: what becomes of a training, its weights and its checkpoints when a loss or gradient is NaN."""

from functools import partial

import pytest
import torch

from hasten import HastenError
from hasten.trainer.callbacks import Callback, ModelCheckpoint, NaNWatch
from tests.trainer.callbacks.trainings import BATCHES, Regression, same, trained, weights

pytestmark = pytest.mark.filterwarnings("ignore:NaNWatch", "ignore:step")


class Elsewhere(Callback):
    """Has NaNWatch work as on a GPU: it may not read each step."""

    def __init__(self, watch):
        self.watch = watch

    def on_train_start(self, trainer, module):
        self.watch._reads_freely = False


class BadGradient(torch.autograd.Function):
    """Fine forward, NaN backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


class SpoiltBackward(Regression):
    def training_step(self, batch, batch_idx):
        x, y = batch
        predicted = self.layers(x)
        if self.trainer.global_step in self.bad_steps:
            predicted = BadGradient.apply(predicted)
        return torch.nn.functional.mse_loss(predicted, y)


def finite(module):
    return all(torch.isfinite(p).all() for p in module.parameters())


def test_stop_names_the_step_and_leaves_the_weights_finite(tmp_path, capfd):
    model, watch = Regression(bad_steps=[2]), NaNWatch()
    trainer = trained(tmp_path, [watch], model, epochs=3)
    assert trainer.global_step == 3
    assert watch.bad_steps == [2]
    assert finite(model)
    said = capfd.readouterr().err
    assert "step 2: the loss is nan" in said
    assert "learning rate" in said


def test_raise(tmp_path):
    with pytest.raises(HastenError, match="step 2: the loss is nan"):
        trained(tmp_path, [NaNWatch("raise")], Regression(bad_steps=[2]))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, partial(torch.optim.Adam, fused=True)])
@pytest.mark.parametrize("kind", [Regression, SpoiltBackward])
@pytest.mark.parametrize("reads_freely", [True, False])
def test_skip_is_as_if_the_batch_had_not_been(tmp_path, optimizer, kind, reads_freely):
    class Left(kind):
        """Leaves the bad step out by itself."""

        def training_step(self, batch, batch_idx):
            return None if self.trainer.global_step in (1, 5) else super().training_step(batch, batch_idx)

    model, watch = kind(bad_steps=[1, 5], optimizer=optimizer), NaNWatch("skip", every_n_steps=3)
    callbacks = [watch] if reads_freely else [watch, Elsewhere(watch)]
    trained(tmp_path, callbacks, model, epochs=2, validate=False)
    other = Left(optimizer=optimizer)
    trained(tmp_path, [], other, epochs=2, validate=False)
    assert watch.skipped == 2
    assert set(watch.bad_steps) == {1, 5}
    assert same(weights(model), weights(other))
    assert finite(model)


def test_a_poisoned_batch_drops_the_whole_accumulated_step(tmp_path):
    class OneBad(Regression):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 0 else 1)

    model, watch = OneBad(), NaNWatch("skip")
    trained(tmp_path, [watch], model, accumulate_grad_batches=2, validate=False)
    assert watch.skipped == 1
    assert finite(model)


def test_skipping_without_end_stops(tmp_path, capfd):
    watch = NaNWatch("skip", patience=3)
    trainer = trained(tmp_path, [watch], Regression(bad_steps=range(2, 100)), epochs=10)
    assert trainer.global_step == 5
    assert "3 steps in a row" in capfd.readouterr().err


def test_where_reading_costs_it_reads_every_n_steps(tmp_path):
    watch = NaNWatch(every_n_steps=3)
    trainer = trained(tmp_path, [watch, Elsewhere(watch)], Regression(bad_steps=[1]), epochs=5)
    assert trainer.global_step == 3
    assert watch.bad_steps == [1, 2]  # step 2 came out of weights that were lost by then


def test_gradients_are_watched_if_asked_to(tmp_path):
    trainer = trained(tmp_path, [NaNWatch()], SpoiltBackward(bad_steps=[1]), validate=False)
    assert trainer.global_step == 3  # noticed one step later, by the loss
    watch = NaNWatch(watch_gradients=True)
    model = SpoiltBackward(bad_steps=[1])
    assert trained(tmp_path, [watch], model, validate=False).global_step == 2
    assert finite(model)


def test_no_checkpoint_of_lost_weights(tmp_path):
    watch = NaNWatch(every_n_steps=1000)
    checkpoint = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1, save_top_k=1, save_last=True)
    trained(tmp_path, [watch, Elsewhere(watch), checkpoint], Regression(bad_steps=[BATCHES]), epochs=3)
    kept = sorted(path.name for path in (tmp_path / "kept").glob("*.ckpt"))
    assert kept == [f"epoch=0-step={BATCHES}.ckpt", "last.ckpt"]


@pytest.mark.parametrize("arguments", [{"action": "ignore"}, {"every_n_steps": 0}, {"patience": 0}])
def test_arguments_that_make_no_sense(arguments):
    with pytest.raises(HastenError, match="NaNWatch"):
        NaNWatch(**arguments)
