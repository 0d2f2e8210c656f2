"""ckpt_path="last": the file whose training was furthest, by what the files say."""

from __future__ import annotations

import os
import shutil
import time
import warnings

import pytest

import hasten
from hasten.callbacks import ModelCheckpoint
from hasten.trainer.checkpoint import latest_good, read, write
from tests.trainer.resume.trainings import Net, loaders


def fitted(folder, epochs, ckpt_path=None, checkpoint_format="hasten", **more):
    checkpoint = ModelCheckpoint(folder, save_top_k=-1, **more)  # all are kept
    trainer = hasten.Trainer(
        max_epochs=epochs, default_root_dir=folder, callbacks=[checkpoint], logger=False, enable_progress_bar=False,
        enable_model_summary=False, checkpoint_format=checkpoint_format, limit_train_batches=2, limit_val_batches=1,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(Net(), *loaders({}), ckpt_path=ckpt_path)
    return trainer, " ".join(str(one.message) for one in said)


def step(path):
    return read(path)["global_step"]


@pytest.mark.parametrize("checkpoint_format", ["hasten", "torch"])
def test_an_old_file_whose_date_lies_ahead(tmp_path, checkpoint_format):
    trainer, _ = fitted(tmp_path, 2, checkpoint_format=checkpoint_format)
    old, new = sorted(tmp_path.glob("*.ckpt"), key=step)
    os.utime(old, (time.time() + 1e6,) * 2)
    shutil.copy(old, tmp_path / "copy.ckpt")
    resumed, _ = fitted(tmp_path, 3, "last")
    assert resumed.ckpt_path == str(new)
    assert resumed.global_step == trainer.global_step * 3 // 2


def test_weights_only_files_are_passed_over_and_named(tmp_path):
    fitted(tmp_path, 1)
    (whole,) = tmp_path.glob("*.ckpt")
    trainer, _ = fitted(tmp_path / "other", 2)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    resumed, said = fitted(tmp_path, 2, "last")
    assert resumed.ckpt_path == str(whole)
    assert f"{tmp_path / 'weights.ckpt'} was passed over: it holds weights only" in said
    assert trainer.checkpointing.find("last", "validate")  # which may well take weights only


def test_nothing_but_weights_begins_a_training(tmp_path):
    trainer, _ = fitted(tmp_path, 1, save_weights_only=True)
    again, said = fitted(tmp_path, 1, "last")
    assert again.global_step == trainer.global_step
    assert "weights only" in said
    assert "No checkpoint will be loaded" in said


def test_a_run_begun_again_comes_after_the_one_before(tmp_path, monkeypatch):
    fitted(tmp_path, 2)
    early, _ = sorted(tmp_path.glob("*.ckpt"), key=step)
    fitted(tmp_path, 1)
    assert latest_good(tmp_path)[0].name == f"{early.stem}-v1.ckpt"
    fitted(tmp_path, 2, early, filename="branch")  # from an earlier point: what it writes is what one goes on from
    assert latest_good(tmp_path)[0].name == "branch.ckpt"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 1e6)  # the next machine's clock is behind
    fitted(tmp_path, 3, "last", filename="later")
    assert latest_good(tmp_path)[0].name == "later.ckpt"


@pytest.mark.parametrize("loops", [{}, {"begun": "x", "hasten": 3}, {"begun": float("nan")}, 5, None, {1: 2}])
def test_strange_files_only_come_first(tmp_path, loops):
    write(tmp_path / "strange.ckpt", {"loops": loops, "global_step": "many", "state_dict": {}, "optimizer_states": []})
    write(tmp_path / "a.ckpt", {"global_step": 3, "state_dict": {}, "optimizer_states": []})
    assert latest_good(tmp_path, to_resume=True) == (tmp_path / "a.ckpt", [])
