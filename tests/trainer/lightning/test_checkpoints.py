"""Checkpoints between hasten and Lightning: each reads what it can of the other's, and a training goes on."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainer.lightning.measured import Measured
from tests.trainer.lightning.sides import L, Net, assert_rows, assert_states, both, plain, run, sgd, shown, shuffled

pytestmark = pytest.mark.filterwarnings("ignore")


class Saved(L.LightningModule):
    """Has hyper-parameters of several kinds.

    Args:
        width: Of the hidden layer.
        lr: The learning rate.
        names: Nothing.
        loss: A module, which is no hyper-parameter.
    """

    def __init__(self, width=8, lr=0.1, names=("a", "b"), loss=None):
        super().__init__()
        self.save_hyperparameters(ignore=["loss"])
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
        self.criterion = loss or torch.nn.MSELoss()
        self.epochs_seen = 0

    def training_step(self, batch, batch_idx):
        return self.criterion(self.net(batch[0]), batch[1])

    def on_train_epoch_end(self):
        self.epochs_seen += 1

    def on_save_checkpoint(self, checkpoint):
        checkpoint["epochs_seen"] = self.epochs_seen

    def on_load_checkpoint(self, checkpoint):
        self.epochs_seen = checkpoint["epochs_seen"]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class Namespace(Net):
    """Keeps its hyper-parameters as they come."""

    def __init__(self, **hparams):
        super().__init__()
        self.save_hyperparameters()


def made():
    return Saved(width=6, lr=0.05, loss=torch.nn.MSELoss())


@pytest.mark.parametrize("kind", ["hasten", "torch"])
def test_lightning_loads_what_hasten_saved(kind, tmp_path):
    ours, theirs = run("hasten", made, checkpoint_format=kind), run("lightning", made)
    assert ours.hparams == theirs.hparams == [{"width": 6, "lr": 0.05, "names": ("a", "b")}]
    ours.trainer.save_checkpoint(tmp_path / "a.ckpt")
    theirs.trainer.save_checkpoint(tmp_path / "b.ckpt")
    loaded = Saved.load_from_checkpoint(tmp_path / "a.ckpt", lr=0.5)
    reference = Saved.load_from_checkpoint(tmp_path / "b.ckpt", lr=0.5)
    assert_states(loaded.state_dict(), reference.state_dict())
    assert loaded.epochs_seen == reference.epochs_seen == 2
    assert (loaded.hparams.width, loaded.hparams.lr, list(loaded.hparams.names)) == (6, 0.5, ["a", "b"])
    saved, other = torch.load(tmp_path / "a.ckpt"), torch.load(tmp_path / "b.ckpt", weights_only=False)
    assert other.keys() <= saved.keys() | {"MixedPrecision"}
    for key in ("epoch", "global_step", "epochs_seen", "hparams_name", "pytorch-lightning_version"):
        assert saved[key] == other[key], key
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_states(saved[key], other[key])


def test_hyper_parameters_by_keywords(tmp_path):
    ours, theirs = both(lambda: Namespace(depth=3, name="x", nested={"a": [1, 2.5, None]}))
    ours.trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = Namespace.load_from_checkpoint(tmp_path / "a.ckpt")
    assert (
        dict(loaded.hparams)
        == dict(theirs.module.hparams)
        == {"depth": 3, "name": "x", "nested": {"a": [1, 2.5, None]}}
    )


WITHOUT_HASTEN = """
import sys
sys.modules["hasten"] = None
import lightning.pytorch as L, torch

class Saved(L.LightningModule):
    def __init__(self, width=8, lr=0.1, names=("a", "b"), loss=None):
        super().__init__()
        self.save_hyperparameters(ignore=["loss"])
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))

module = Saved.load_from_checkpoint(sys.argv[1])
assert module.hparams.width == 6
print(module.net(torch.ones(1, 4)).item().hex())
"""


def test_the_torch_format_is_read_without_hasten(tmp_path):
    ours = run("hasten", made, checkpoint_format="torch")
    ours.trainer.save_checkpoint(tmp_path / "a.ckpt")
    command = [sys.executable, "-c", WITHOUT_HASTEN, str(tmp_path / "a.ckpt")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert said.returncode == 0, said.stderr
    assert said.stdout.split()[-1] == ours.module.net(torch.ones(1, 4)).item().hex()


def test_trainings_of_one_process_save_into_one_folder_when_they_are_over(tmp_path):
    folds = [run("hasten", made) for _ in range(2)]
    for index, fold in enumerate(folds):
        fold.trainer.save_checkpoint(tmp_path / "folds" / f"{index}.ckpt")
    assert len(list((tmp_path / "folds").glob("*.ckpt"))) == 2


class Saves(L.Callback):
    """Saves at one batch of all."""

    def __init__(self, path, batch):
        self.path, self.batch = path, batch
        self.rows = 0  # logged until then

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == self.batch:
            trainer.save_checkpoint(self.path)
            self.rows = len(trainer.logger.rows)


def test_hasten_goes_on_from_a_checkpoint_of_lightning(tmp_path):
    def scheduled():
        def configure(module):
            optimizer = sgd(module)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)]

        return Net(configure)

    first = L.callbacks.ModelCheckpoint(tmp_path, filename="first", save_on_train_epoch_end=True)
    run("lightning", scheduled, val=plain, callbacks=lambda: [first], enable_checkpointing=True)
    path = Path(first.best_model_path)
    ours, theirs = both(scheduled, val=plain, ckpt_path=path, max_epochs=4, seed=5, num_sanity_val_steps=0)
    assert (ours.trainer.current_epoch, ours.trainer.global_step) == (4, 20)
    states = [one.trainer.optimizers[0].state_dict() for one in (ours, theirs)]
    assert_states(*states)


@pytest.mark.parametrize("flags", [{}, {"val_check_interval": 2}, {"accumulate_grad_batches": 3}], ids=str)
@pytest.mark.parametrize("batch", [4, 6])
def test_a_training_with_metrics_goes_on_within_an_epoch(batch, flags, tmp_path):
    path = tmp_path / "cut.ckpt"

    flags = {"max_epochs": 3, "val": plain, "train": shuffled, **flags}
    saves, again = Saves(path, batch), Saves(tmp_path / "again.ckpt", batch)
    whole = run("hasten", Measured, callbacks=lambda: [saves], **flags)
    rest = run("hasten", Measured, callbacks=lambda: [again], ckpt_path=path, seed=99, **flags)
    assert_states(rest.module.state_dict(), whole.module.state_dict())
    assert shown(rest.trainer.callback_metrics) == shown(whole.trainer.callback_metrics)
    assert torch.equal(rest.random, whole.random)
    assert_rows(rest.rows, whole.rows[saves.rows :], "row")
    callback = [[row["callback"] for row in one.steps] for one in (rest, whole)]
    assert_rows(callback[0], callback[1][-len(rest.steps) :], "step")
