"""What people who tried the Trainer tripped over."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hasten
from hasten import HastenError
from hasten.callbacks import Callback, ModelCheckpoint, NaNWatch

X = torch.arange(64 * 4, dtype=torch.float32).reshape(64, 4) / 256
Y = (X.sum(1) > 2).long()


def loader():
    return DataLoader(TensorDataset(X, Y), batch_size=8)


class Constant(hasten.Module):
    """Its loss is always 8."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).sum() * 0 + 8.0

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def trainer(tmp_path):
    def build(**flags):
        off = {"enable_model_summary": False, "enable_checkpointing": False, "enable_progress_bar": False}
        return hasten.Trainer(**{"default_root_dir": tmp_path, "max_epochs": 2, "logger": False, **off, **flags})

    return build


def test_a_schedule_may_begin_with_more_than_one(trainer):
    fitted = trainer(accumulate_grad_batches={0: 8, 1: 2})
    fitted.fit(Constant(), loader())
    assert fitted.global_step == 1 + 4


class Stream(IterableDataset):
    def __iter__(self):
        return iter(TensorDataset(X, Y))


@pytest.mark.parametrize(
    ("flags", "data", "line"),
    [
        ({"accumulate_grad_batches": 4, "max_epochs": 1}, loader, "8/8 batches"),
        ({"max_steps": 5}, loader, "5/8 batches"),
        ({"max_steps": 5}, lambda: DataLoader(Stream(), batch_size=8), "5 batches"),
    ],
)
def test_the_progress_line_says_what_ran_and_the_loss_as_it_is(trainer, capsys, flags, data, line):
    trainer(enable_progress_bar=True, **flags).fit(Constant(), data())
    said = capsys.readouterr().out
    assert line in said
    assert "loss 8" in said


@pytest.mark.parametrize(
    ("spoil", "fix"),
    [(lambda net, x: net(x).pow(2), "one number"), (lambda net, x: net(x).mean().detach(), "no graph")],
    ids=["many numbers", "detached"],
)
def test_torchs_error_about_a_loss_gets_a_note_that_says_whose_it_is(trainer, spoil, fix):
    class Spoilt(Constant):
        def training_step(self, batch, batch_idx):
            return spoil(self.net, batch[0])

    with pytest.raises(RuntimeError) as error:
        trainer().fit(Spoilt(), loader())
    (note,) = error.value.__notes__
    assert "Spoilt.training_step" in note
    assert fix in note


@pytest.mark.parametrize("watched", [False, True])
def test_a_logged_loss_that_is_nan_at_the_end_is_said_unless_it_is_watched(trainer, capsys, watched):
    class Diverged(Constant):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx) * float("nan")
            self.log_dict({"train_loss": loss, "accuracy": 0.5})
            return loss

    trainer(callbacks=[NaNWatch()] if watched else None).fit(Diverged(), loader())
    assert ("train_loss was nan at the end" in capsys.readouterr().err) is not watched


def test_no_weights_are_scored_that_were_not_asked_for(trainer, tmp_path):
    never = trainer(callbacks=[ModelCheckpoint(dirpath=tmp_path / "none")], enable_checkpointing=True)
    with pytest.raises(FileNotFoundError, match="no checkpoint yet"):
        never.validate(Constant(), loader(), ckpt_path="last")


def test_a_trainer_that_is_done_says_that_it_trained_nothing(trainer):
    done = trainer()
    done.fit(Constant(), loader())
    with pytest.warns(UserWarning, match="nothing was trained"):
        done.fit(Constant(), loader())


def test_a_hook_of_old_that_modules_still_carry_is_said(trainer):
    old = type("Old", (Constant,), {"on_epoch_end": lambda self: None})
    with pytest.warns(UserWarning, match="define on_train_epoch_end"):
        trainer().fit(old(), loader())


@pytest.mark.parametrize("hook", ["training_epoch_end", "validation_epoch_end", "test_epoch_end"])
def test_hooks_that_nobody_calls_any_more_are_refused(trainer, hook):
    old = type("Old", (Constant,), {hook: lambda self, *outputs: None})
    with pytest.raises(NotImplementedError, match=hook):
        trainer().fit(old(), loader())


def test_a_callback_may_be_any_object_with_hooks(trainer):
    class Duck:
        seen = False

        def on_train_start(self, trainer, module):
            self.seen = True

    duck = Duck()
    trained = trainer(callbacks=[duck], enable_checkpointing=True)
    trained.fit(Constant(), loader())
    assert duck.seen
    assert Path(trained.checkpoint_callback.best_model_path).is_file()


def test_a_logger_that_lacks_methods_is_refused_before_anything_runs(trainer):
    class Half:
        def log_metrics(self, metrics, step):
            pass

    with pytest.raises(HastenError, match="Half has no log_hyperparams, save, finalize"):
        trainer(logger=Half())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"val_check_interval": 0}, "never comes"),
        ({"profiler": True}, "no profiler"),
        ({"epochs": 3}, "max_epochs"),
        ({"gpu": 1}, "accelerator"),
        ({"max_time": {"hour": 1}}, "hour"),
    ],
)
def test_flags_that_came_without_a_word(trainer, flags, message):
    with pytest.raises(HastenError, match=message):
        trainer(**flags)


def test_things_given_as_classes(trainer):
    with pytest.raises(TypeError, match=r"give one that is built: Constant\(\.\.\.\)"):
        trainer().fit(Constant, loader())
    with pytest.raises(TypeError, match="CrossEntropyLoss"):
        trainer().fit(torch.nn.Linear(4, 2), loader(), loss=torch.nn.CrossEntropyLoss)


def test_a_list_of_ready_batches_is_not_taken_for_loaders(trainer):
    with pytest.raises(TypeError, match="ready batches"):
        trainer().fit(Constant(), [(X, Y), (X, Y)])


def test_a_generator_that_is_used_up_is_said(trainer):
    with pytest.warns(UserWarning, match="used up"):
        trainer().fit(Constant(), ((X[:8], Y[:8]) for _ in range(5)))


def test_a_plain_net_is_known_again_after_fit(trainer):
    net = torch.nn.Linear(4, 2)
    fitted = trainer()
    fitted.fit(net, loader(), loss=F.cross_entropy)
    assert len(fitted.predict(net, loader())) == 8


def test_a_stage_within_a_stage_is_refused(trainer):
    class Validates(Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.validate(module, loader())

    with pytest.raises(HastenError, match=r"validate\(\) is called while fit\(\) runs"):
        trainer(callbacks=[Validates()]).fit(Constant(), loader())


def test_another_optimizer_than_the_checkpoints_is_named(trainer, tmp_path):
    class Adam(Constant):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    first = trainer(max_epochs=1)
    first.fit(Constant(), loader())
    first.save_checkpoint(tmp_path / "sgd.ckpt")
    with pytest.raises(HastenError, match="another optimizer than AdamW"):
        trainer().fit(Adam(), loader(), ckpt_path=tmp_path / "sgd.ckpt")


def test_metrics_left_in_eval_mode_by_the_sanity_check_raise_no_alarm(trainer):
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measured(Constant):
        def __init__(self):
            super().__init__()
            self.accuracy = torchmetrics.MeanMetric()

        def validation_step(self, batch, batch_idx):
            self.accuracy(batch[0])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer().fit(Measured(), loader(), loader())
    assert not [one for one in caught if "eval mode" in str(one.message)]


def test_is_last_batch(trainer):
    class Notes(Constant):
        last = ()

        def training_step(self, batch, batch_idx):
            self.last += (self.trainer.is_last_batch,)
            return super().training_step(batch, batch_idx)

    module = Notes()
    trainer(max_epochs=1).fit(module, loader())
    assert module.last == (False,) * 7 + (True,)


SCRIPT = """
import torch, hasten
from torch.utils.data import DataLoader, TensorDataset
X, Y = torch.randn(64, 4), torch.zeros(64, dtype=torch.long)
trainer = hasten.Trainer(max_epochs=3, logger=False, enable_checkpointing=False)
trainer.fit(torch.nn.Linear(4, 2), DataLoader(TensorDataset(X, Y)), loss=torch.nn.functional.cross_entropy)
open("done", "w").write(str(trainer.current_epoch))
"""


@pytest.mark.parametrize("stdout", ["| head -1", ">&-"])
def test_a_terminal_that_is_gone_does_not_end_the_training(tmp_path, stdout):
    (tmp_path / "train.py").write_text(SCRIPT)
    subprocess.run(
        ["bash", "-c", f"'{sys.executable}' train.py {stdout}"], cwd=tmp_path, capture_output=True, timeout=100
    )
    assert (tmp_path / "done").read_text() == "3"


class Pictures(hasten.Module):
    def __init__(self):
        super().__init__()
        conv = torch.nn.Conv2d(3, 8, 3)
        self.net = torch.nn.Sequential(conv, torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 2))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def pictures():
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(torch.randn(32, 3, 8, 8, generator=generator), torch.arange(32) % 2), batch_size=4, shuffle=True
    )


# slow: compiles C++
@pytest.mark.parametrize("flag", ["channels_last", pytest.param("compile", marks=pytest.mark.slow)])
def test_a_model_that_was_changed_is_changed_before_the_first_resumed_step(trainer, tmp_path, flag):
    def trained(steps, path=None):
        hasten.seed_everything(0)
        module = Pictures()
        fitted = trainer(max_steps=steps, max_epochs=-1, **{flag: True})
        fitted.fit(module, pictures(), ckpt_path=path)
        return fitted, module

    _, whole = trained(12)
    first, _ = trained(5)
    first.save_checkpoint(tmp_path / "five.ckpt")
    _, resumed = trained(12, tmp_path / "five.ckpt")
    for expected, got in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, got)


def test_the_modules_that_a_step_calls_are_looked_for_once(trainer, monkeypatch):
    looks = []
    register = torch.nn.Module.register_forward_pre_hook
    monkeypatch.setattr(
        torch.nn.Module, "register_forward_pre_hook", lambda part, hook: looks.append(part) or register(part, hook)
    )
    module = Pictures()
    trainer(max_epochs=3, channels_last=True).fit(module, pictures())
    assert len(looks) == len(list(module.modules()))


def test_a_trainer_that_could_not_begin_may_be_tried_again(trainer):
    tried = trainer(num_nodes=2)
    for _ in range(2):
        with pytest.raises(HastenError, match="no launcher"):
            tried.fit(Constant(), loader())
