"""What steps may give and what comes back: outputs, predictions, results, checkpoints to evaluate."""

import pytest
import torch
from torch.nn import functional as F

import hasten
from hasten import HastenError
from hasten.callbacks import Callback, ModelCheckpoint
from tests.trainer.trainings import Regression, assert_same, by_hand, dataset, loader, quiet


class Outputs(Callback):
    def __init__(self):
        self.train, self.validation = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.train.append(outputs)

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.validation.append(outputs)


def test_training_step_gives_a_tensor():
    outputs = Outputs()
    quiet(callbacks=outputs).fit(Regression(), loader())
    assert [list(one) for one in outputs.train] == [["loss"]] * 4
    assert not outputs.train[0]["loss"].requires_grad


def test_training_step_gives_a_dict():
    class Dict(Regression):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "index": batch_idx}

    outputs, module = Outputs(), Dict()
    torch.manual_seed(7)
    quiet(callbacks=outputs, max_epochs=2).fit(module, loader())
    assert [one["index"] for one in outputs.train] == [0, 1, 2, 3] * 2
    assert_same(module.net.state_dict(), by_hand(loader(), epochs=2))


def test_training_step_gives_none_and_the_batch_is_skipped():
    class Skips(Regression):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    outputs, module = Outputs(), Skips(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    torch.manual_seed(7)
    trainer = quiet(callbacks=outputs)
    trainer.fit(module, loader())
    assert outputs.train[1] == {}
    net = Regression().net
    torch.manual_seed(7)
    optimizer = module.optimizer(net.parameters())
    for index, (x, y) in enumerate(loader()):
        loss = F.mse_loss(net(x), y)
        if index != 1:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert_same(module.net.state_dict(), net.state_dict())


def test_outputs_are_scaled_as_they_were_differentiated():
    outputs = Outputs()
    module = Regression(lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    quiet(callbacks=outputs, accumulate_grad_batches=2, limit_train_batches=2).fit(module, loader(shuffle=False))
    plain = Outputs()
    module = Regression(lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    torch.manual_seed(0)
    quiet(callbacks=plain, limit_train_batches=2).fit(module, loader())
    assert outputs.train[0]["loss"] < plain.train[0]["loss"]


@pytest.mark.parametrize("value", [3.0, "loss", [1], {"lost": 1}])
def test_training_step_gives_something_else(value):
    class Odd(Regression):
        def training_step(self, batch, batch_idx):
            return value

    with pytest.raises(HastenError, match=r"training_step (gave|returns)"):
        quiet().fit(Odd(), loader())


def test_steps_without_a_batch_index():
    class Short(Regression):
        def training_step(self, batch):
            return F.mse_loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch):
            return batch[0].shape

        def predict_step(self, batch):
            return batch[0].shape

    outputs = Outputs()
    trainer = quiet(callbacks=outputs, num_sanity_val_steps=0)
    trainer.fit(Short(), loader(), loader())
    assert outputs.validation == [(8, 4)] * 4
    assert trainer.predict(dataloaders=loader()) == [(8, 4)] * 4


# -- predict -----------------------------------------------------------------------------------------------


def test_predictions_of_one_loader_and_of_two():
    module = Regression().eval()
    expected = [module(x).detach() for x, _ in loader()]
    found = quiet().predict(module, loader())
    assert len(found) == 4
    assert all(torch.equal(one, other) for one, other in zip(found, expected))
    both = quiet().predict(module, [loader(), loader(16)])
    assert [len(one) for one in both] == [4, 2]
    assert torch.equal(both[1][0], expected[0])
    assert quiet().predict(module, loader(), return_predictions=False) is None


def test_predict_step_is_forward_by_default():
    class Forward(hasten.Module):
        def forward(self, x):
            return x * 2

    found = quiet().predict(Forward(), torch.utils.data.DataLoader(torch.ones(2)))
    assert float(sum(x.sum() for x in found)) == 4
    with pytest.raises(TypeError, match="taken for several loaders"):
        quiet().predict(Forward(), [torch.ones(2), torch.zeros(2)])


def test_a_loss_module_predicts_and_validates():
    net = Regression().net
    trainer = quiet()
    trainer.fit(net, loader(), loader(), loss=F.mse_loss)
    assert "val_loss" in trainer.callback_metrics
    assert [len(one) for one in trainer.predict(dataloaders=loader())] == [8] * 4
    assert list(trainer.test(dataloaders=loader(), verbose=False)[0]) == ["test_loss"]
    with pytest.raises(HastenError, match="input, target"):
        quiet().fit(net, torch.utils.data.DataLoader(dataset().tensors[0]), loss=F.mse_loss)


# -- results -----------------------------------------------------------------------------------------------


def test_results_of_validate_and_test_are_numbers():
    module = Regression().eval()
    losses = [float(F.mse_loss(module(x), y)) for x, y in loader()]
    [result] = quiet().validate(module, loader(), verbose=False)
    assert result == {"val_loss": pytest.approx(sum(losses) / 4)}
    assert type(result["val_loss"]) is float
    assert quiet().test(module, [loader(), loader(8)], verbose=False) == [
        {"test_loss/dataloader_idx_0": pytest.approx(sum(losses) / 4)},
        {"test_loss/dataloader_idx_1": pytest.approx(losses[0])},
    ]


def test_results_are_shown_unless_told_otherwise(capsys):
    quiet().validate(Regression(), loader())
    assert "val_loss" in capsys.readouterr().out
    quiet().validate(Regression(), loader(), verbose=False)
    assert "val_loss" not in capsys.readouterr().out


def test_evaluation_changes_neither_modes_nor_weights_nor_gradients():
    module = Regression()
    module.net[0].eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    quiet().validate(module, loader(), verbose=False)
    assert_same(module.state_dict(), before)
    assert not module.net[0].training
    assert module.net[1].training
    assert torch.is_grad_enabled()


def test_several_loaders_need_a_step_that_tells_them_apart():
    class Short(Regression):
        def validation_step(self, batch, batch_idx):
            pass

    with pytest.raises(RuntimeError, match="dataloader_idx"):
        quiet().validate(Short(), [loader(), loader()])

    class Needs(Regression):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            pass

    with pytest.raises(RuntimeError, match="dataloader_idx"):
        quiet().validate(Needs(), loader())


def test_nothing_to_evaluate():
    with pytest.raises(TypeError):
        quiet().validate()
    with pytest.raises(TypeError, match="dataloader"):
        quiet().validate(Regression())
    with pytest.raises(TypeError, match="dataloader"):
        quiet().fit(Regression())


# -- which weights -----------------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path):
    """A Trainer whose best checkpoint is of the first of three epochs."""

    class Worse(Regression):
        def validation_step(self, batch, batch_idx):
            self.log("score", float(self.trainer.current_epoch))

    checkpoint = ModelCheckpoint(
        dirpath=tmp_path, monitor="score", mode="min", save_last=True, save_top_k=-1, filename="{epoch}"
    )
    trainer = quiet(enable_checkpointing=True, callbacks=checkpoint, max_epochs=3, default_root_dir=tmp_path)
    trainer.fit(Worse(), loader(), loader())
    return trainer


def first_weight(trainer):
    return trainer.model.net[0].weight.detach().clone()


def test_best_and_last_and_a_path(trained, tmp_path):
    last = first_weight(trained)
    trained.test(ckpt_path="best", dataloaders=loader(), verbose=False)
    best = first_weight(trained)
    assert not torch.equal(best, last)
    assert trained.ckpt_path == trained.checkpoint_callback.best_model_path
    trained.test(ckpt_path="last", dataloaders=loader(), verbose=False)
    assert torch.equal(first_weight(trained), last)
    trained.test(ckpt_path=tmp_path / "epoch=0.ckpt", dataloaders=loader(), verbose=False)
    assert torch.equal(first_weight(trained), best)


def test_an_evaluation_says_whose_weights_it_takes(trained, capsys):
    """Only `fit` goes on from a checkpoint."""
    trained.test(ckpt_path="best", dataloaders=loader(), verbose=False)
    said = capsys.readouterr().err
    assert f"test: weights of {trained.checkpoint_callback.best_model_path}" in said
    assert "going on" not in said


def test_without_a_model_the_best_is_taken_and_that_is_said(trained):
    last = first_weight(trained)
    with pytest.warns(UserWarning, match="best model of the previous"):
        trained.test(dataloaders=loader(), verbose=False)
    assert not torch.equal(first_weight(trained), last)
    trained.test(trained.model, loader(), verbose=False)  # a model that is given is taken as it is
    assert trained.ckpt_path is None


def test_fit_goes_on_from_last(trained, tmp_path):
    trainer = quiet(
        enable_checkpointing=True, max_epochs=4, default_root_dir=tmp_path,
        callbacks=ModelCheckpoint(dirpath=tmp_path, save_last=True),
    )  # fmt: skip
    trainer.fit(Regression(), loader(), ckpt_path="last")
    assert (trainer.current_epoch, trainer.global_step) == (4, 16)
    with pytest.raises(HastenError, match="max_epochs=3"):
        quiet(max_epochs=3).fit(Regression(), loader(), ckpt_path=trainer.checkpoint_callback.last_model_path)


def test_checkpoints_that_are_not_there(tmp_path):
    with pytest.raises(HastenError, match="best"):
        quiet().fit(Regression(), loader(), ckpt_path="best")
    rehearsed = quiet(fast_dev_run=True, callbacks=ModelCheckpoint(monitor="score"))
    rehearsed.fit(Regression(), loader())
    with pytest.raises(HastenError, match="fast_dev_run"):  # not that there is no ModelCheckpoint: there is one
        rehearsed.test(ckpt_path="best", dataloaders=loader())
    with pytest.warns(UserWarning, match="last"):
        quiet(default_root_dir=tmp_path).fit(Regression(), loader(), ckpt_path="last")
    with pytest.raises((HastenError, FileNotFoundError), match=r"nowhere.ckpt"):
        quiet().fit(Regression(), loader(), ckpt_path=tmp_path / "nowhere.ckpt")
    with pytest.raises(AttributeError, match="model"):
        quiet().save_checkpoint(tmp_path / "x.ckpt")
