"""Module and Trainer as objects: hyper-parameters, checkpoints, copies, pickles; what imports cost."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch

import hasten
from hasten import HastenError
from hasten.callbacks import EarlyStopping
from tests.trainer.trainings import Regression, assert_same, loader, quiet


class Saved(Regression):
    def __init__(self, width=3, lr=0.1, *, name="n", activation=torch.nn.ReLU, **more):
        super().__init__()
        self.save_hyperparameters(ignore="activation")
        self.extra = torch.nn.Linear(width, 1)
        self.activation = activation


class Child(Saved):
    def __init__(self, depth, **options):
        super().__init__(**options)
        self.save_hyperparameters()
        self.depth = depth


def test_hyperparameters_are_kept():
    module = Saved(5, lr=0.2, momentum=0.9)
    assert module.hparams == {"width": 5, "lr": 0.2, "name": "n", "momentum": 0.9}
    assert module.hparams.lr == module.hparams["lr"] == 0.2
    module.hparams.lr = 0.3
    assert module.hparams["lr"] == 0.3
    with pytest.raises(AttributeError, match="width"):
        module.hparams.nothing  # noqa: B018
    assert Child(4, width=2).hparams == {"depth": 4, "width": 2, "lr": 0.1, "name": "n"}


def test_some_hyperparameters_or_a_dict():
    class Some(hasten.Module):
        def __init__(self, a, b, c=3):
            super().__init__()
            self.save_hyperparameters("a", "c")

    class Dict(hasten.Module):
        def __init__(self, config):
            super().__init__()
            self.save_hyperparameters(config)

    assert Some(1, 2).hparams == {"a": 1, "c": 3}
    assert Dict({"x": 1}).hparams == {"x": 1}


def test_load_from_checkpoint_builds_the_module_anew(tmp_path):
    module = Child(4, width=2, lr=0.2)
    trainer = quiet()
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    loaded = Child.load_from_checkpoint(tmp_path / "one.ckpt")
    assert loaded.hparams == module.hparams
    assert loaded.depth == 4
    assert_same(loaded.state_dict(), module.state_dict())
    assert Child.load_from_checkpoint(tmp_path / "one.ckpt", lr=9.0).hparams.lr == 9.0
    with pytest.raises(RuntimeError, match="size mismatch"):
        Child.load_from_checkpoint(tmp_path / "one.ckpt", width=7)


def test_weights_only_checkpoints_load_too(tmp_path):
    module = Saved()
    trainer = quiet()
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert_same(Saved.load_from_checkpoint(tmp_path / "weights.ckpt").state_dict(), module.state_dict())
    with pytest.raises((HastenError, KeyError), match="weights only"):
        quiet().fit(Saved(), loader(), ckpt_path=tmp_path / "weights.ckpt")


def test_a_module_says_where_it_is():
    module = Regression()
    assert (module.current_epoch, module.global_step, module.global_rank, module.local_rank) == (0, 0, 0, 0)
    assert (module.logger, module.loggers) == (None, [])
    assert module.device == torch.device("cpu")
    assert module.dtype == torch.float32
    assert module.double().dtype == torch.float64
    with pytest.raises(HastenError, match="no trainer yet"):
        module.trainer  # noqa: B018
    trainer = quiet(max_epochs=2)
    trainer.fit(module.float(), loader())
    assert module.trainer is trainer
    assert (module.current_epoch, module.global_step) == (2, 8)


def test_freeze_and_unfreeze():
    module = Regression()
    module.freeze()
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    module.unfreeze()
    assert module.training
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_a_compiled_module_is_trained():
    module = Regression()
    compiled = torch.compile(module, backend="eager")
    trainer = quiet(limit_train_batches=1)
    trainer.fit(compiled, loader())
    assert trainer.global_step == 1


@pytest.mark.parametrize("again", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
@pytest.mark.parametrize("when", ["before", "after"])
def test_trainers_and_modules_are_copied_and_pickled(again, when):
    module = Saved(lr=0.2)
    module.optimizer = torch.optim.AdamW  # a lambda could not be pickled
    trainer = quiet(callbacks=EarlyStopping("val_loss"), max_epochs=1)
    if when == "after":
        trainer.fit(module, loader(), loader())
    other_module, other = again(module), again(trainer)
    assert_same(other_module.state_dict(), module.state_dict())
    assert other_module.hparams == module.hparams
    assert other_module._trainer is None
    assert other.max_epochs == 1
    other.max_epochs = 2
    other.fit(other_module, loader(), loader())
    assert trainer.current_epoch == (1 if when == "after" else 0)
    assert other.current_epoch == 2


def test_a_module_within_training_can_be_copied():
    class Copies(Regression):
        def on_train_batch_start(self, batch, batch_idx):
            copy.deepcopy(self)
            copy.deepcopy(self.trainer)

    quiet().fit(Copies(), loader())


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import hasten", ["torch", "numpy", "rich", "lightning", "tensorboard", "pydantic"]),
        ("import hasten; hasten.Plan; hasten.HastenError", ["torch"]),
        (
            "from hasten import Trainer, Module; Trainer(logger=False, accelerator='cpu', enable_progress_bar=False)",
            ["rich", "tensorboard", "lightning", "pytorch_lightning", "torchmetrics", "pandas", "torch._dynamo"],
        ),
        ("import hasten.cli", ["torch"]),
    ],
)
def test_imports_bring_in_no_more_than_they_need(statement, absent):
    code = f"{statement}\nimport sys\nprint([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "[]", done.stderr
