"""A run that is killed between writing a checkpoint and removing the one it replaces: the next start removes that."""

from __future__ import annotations

import shutil

import pytest
import torch

import hasten
from hasten.callbacks import ModelCheckpoint
from hasten.trainer.checkpoint import read
from hasten.trainer.checkpoint.saver import Saver
from tests.trainer.resume.trainings import Net, loaders


def fitted(folder, epochs, ckpt_path=None, **options):
    checkpoint = ModelCheckpoint(folder, **options)
    trainer = hasten.Trainer(
        max_epochs=epochs, default_root_dir=folder, callbacks=[checkpoint], logger=False, enable_progress_bar=False,
        enable_model_summary=False, limit_train_batches=2, limit_val_batches=1,
    )  # fmt: skip
    trainer.fit(Net(), *loaders({}), ckpt_path=ckpt_path)
    return checkpoint


@pytest.fixture
def killed_before_removing(monkeypatch):
    """What is asked to be removed stays: a kill that comes right after each write."""
    with monkeypatch.context() as patched:
        patched.setattr(Saver, "remove", lambda self, path: None)
        yield patched


def names(folder):
    return {path.name for path in folder.glob("*.ckpt")}


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, {"epoch=2-step=6.ckpt"}),
        ({"monitor": "val_loss", "save_top_k": 1}, None),
        ({"save_last": True}, {"epoch=2-step=6.ckpt", "last.ckpt"}),
        ({"save_top_k": -1}, {"epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt", "epoch=2-step=6.ckpt"}),
    ],
)
def test_surplus_files_go_at_the_next_start(tmp_path, killed_before_removing, options, left):
    fitted(tmp_path, 2, **options)
    (tmp_path / "mine.ckpt").write_bytes((tmp_path / "epoch=0-step=2.ckpt").read_bytes())
    killed_before_removing.undo()
    second = (tmp_path / "epoch=1-step=4.ckpt").exists()  # not saved where it was worse than the first
    resumed = "epoch=1-step=4.ckpt" if second else "epoch=0-step=2.ckpt"
    checkpoint = fitted(tmp_path, 3, str(tmp_path / resumed), **options)
    if left is None:  # which of them is best is a matter of the numbers
        left = {path.rpartition("/")[2] for path in checkpoint.best_k_models}
    assert names(tmp_path) - {resumed} == (left | {"mine.ckpt"}) - {resumed}


@pytest.mark.parametrize("what", ["of a later run", "not a checkpoint", "a link", "of somebody else"])
def test_another_file_of_that_name_stays(tmp_path, killed_before_removing, what):
    fitted(tmp_path, 2)
    old, new = tmp_path / "epoch=0-step=2.ckpt", tmp_path / "epoch=1-step=4.ckpt"
    killed_before_removing.undo()
    state = read(old)
    old.unlink()
    if what == "of a later run":
        shutil.copy(tmp_path / new, tmp_path / "kept")
        fitted(tmp_path / "later", 3)
        shutil.copy(next((tmp_path / "later").glob("*.ckpt")), old)
    elif what == "not a checkpoint":
        old.write_bytes(b"notes of a person")
    elif what == "a link":
        shutil.copy(new, tmp_path / "elsewhere")
        old.symlink_to(tmp_path / "elsewhere")
    else:
        del state["loops"]
        torch.save(state, old)
    fitted(tmp_path, 3, str(new))
    assert old.exists()


def test_a_start_from_the_beginning_removes_nothing(tmp_path, killed_before_removing):
    fitted(tmp_path, 2)
    killed_before_removing.undo()
    fitted(tmp_path, 1)
    assert {"epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt"} <= names(tmp_path)
