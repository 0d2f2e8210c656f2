"""LightningDataModules under hasten's Trainer."""

import subprocess
import sys

import pytest
import torch

from tests.trainer.lightning.sides import L, Net, both
from tests.trainer.trainings import loader

pytestmark = pytest.mark.filterwarnings("ignore")


class Data(L.LightningDataModule):
    """Gives loaders, changes batches on their way, and has a state."""

    def __init__(self, samples=40):
        super().__init__()
        self.save_hyperparameters()
        self.prepared, self.stages = "", []
        self.moved = 0

    def prepare_data(self):
        self.prepared += "p"

    def setup(self, stage):
        self.stages.append(stage)

    def teardown(self, stage):
        self.stages.append((stage,))

    def train_dataloader(self):
        return loader(self.hparams.samples, shuffle=True)

    def val_dataloader(self):
        return [loader(16), loader(8)]

    def test_dataloader(self):
        return loader(16)

    def predict_dataloader(self):
        return loader(12)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x + dataloader_idx, y

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.moved += 1
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x * (2 if self.trainer.training else 1), y

    def state_dict(self):
        return {"moved": self.moved}

    def load_state_dict(self, state_dict):
        self.moved = state_dict["moved"]


@pytest.mark.parametrize("spy", [False, True], ids=["", "hooks"])
@pytest.mark.parametrize("fn", ["fit", "validate", "test", "predict"])
def test_data(fn, spy):
    kept = []

    def make():
        kept.append(Data())
        return kept[-1]

    ours, theirs = both(datamodule=make, fn=fn, spy=spy)
    assert str(ours.answer) == str(theirs.answer)
    theirs, ours = kept
    assert (ours.prepared, ours.stages, ours.moved) == (theirs.prepared, theirs.stages, theirs.moved)
    assert ours.moved > 0
    assert ours.trainer is not None


def test_its_state_is_in_checkpoints(tmp_path):
    ours, theirs = both(datamodule=Data)
    saved = []
    for one in (ours, theirs):
        one.trainer.save_checkpoint(tmp_path / "a.ckpt")
        saved.append(torch.load(tmp_path / "a.ckpt", weights_only=False))
    assert saved[0]["Data"] == saved[1]["Data"]
    assert dict(saved[0]["datamodule_hyper_parameters"]) == dict(saved[1]["datamodule_hyper_parameters"])
    ours.trainer.save_checkpoint(tmp_path / "b.ckpt")
    assert Data.load_from_checkpoint(tmp_path / "b.ckpt").hparams.samples == 40


def test_made_from_datasets():
    def make():
        sets = [loader(samples).dataset for samples in (40, 16)]
        return L.LightningDataModule.from_datasets(sets[0], sets[1], batch_size=8)

    both(Net, datamodule=make)


def test_a_callable_of_the_module_for_batches_of_its_own():
    class Moves(Net):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return [part.to(device) * 0.5 for part in batch]

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return tuple(part + dataloader_idx for part in batch)

    both(Moves, val=lambda: [loader(16), loader(8)], spy=True)


BY_ITS_OLD_NAME = """
import logging, sys, warnings
warnings.simplefilter("ignore")
import pytorch_lightning as pl
import hasten, torch
assert "lightning.pytorch" not in sys.modules

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).abs().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), 8, shuffle=True)

    val_dataloader = train_dataloader

for number, trainer in enumerate((pl.Trainer, hasten.Trainer)):
    pl.seed_everything(3)
    module = Module()
    folder = f"{sys.argv[1]}/{number}"
    callbacks = [pl.callbacks.ModelCheckpoint(folder, monitor="val_loss"), pl.callbacks.LearningRateMonitor()]
    logger = pl.loggers.CSVLogger(folder)
    options = dict(max_epochs=2, enable_progress_bar=False, log_every_n_steps=1, accelerator="cpu")
    trainer = trainer(callbacks=callbacks, logger=logger, **options)
    trainer.fit(module, datamodule=Data())
    best = callbacks[0].best_model_path
    loaded = Module.load_from_checkpoint(best)
    weights = [p.detach().sum().item().hex() for one in (module, loaded) for p in one.parameters()]
    print(weights, trainer.global_step, float(callbacks[0].best_model_score).hex(), best.split("/")[-1])
    print(open(f"{logger.log_dir}/metrics.csv").read().replace("\\n", ";"))
assert "lightning.pytorch" not in sys.modules
"""


def test_by_its_old_name(tmp_path):
    pytest.importorskip("pytorch_lightning")
    command = [sys.executable, "-c", BY_ITS_OLD_NAME, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert said.returncode == 0, said.stderr
    lines = said.stdout.strip().splitlines()
    theirs, ours = lines[-4:-2], lines[-2:]
    assert ours == theirs
