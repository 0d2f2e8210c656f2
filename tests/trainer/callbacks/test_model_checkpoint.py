"""ModelCheckpoint: which files a training leaves."""

import os
from datetime import timedelta

import pytest
import torch

from hasten import HastenError
from hasten.trainer.callbacks import Callback, ModelCheckpoint
from hasten.trainer.loggers import CSVLogger
from tests.trainer.callbacks.trainings import BATCHES, Regression, trained


def files(folder):
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))


def test_the_latest_is_kept_by_default(tmp_path):
    checkpoint = ModelCheckpoint()
    trained(tmp_path, [checkpoint], epochs=3)
    assert files(tmp_path / "checkpoints") == [f"epoch=2-step={3 * BATCHES}.ckpt"]
    assert checkpoint.best_model_path == str(tmp_path / "checkpoints" / f"epoch=2-step={3 * BATCHES}.ckpt")
    assert checkpoint.best_model_score is None


def test_checkpoints_lie_beside_the_logs(tmp_path):
    trained(tmp_path, [ModelCheckpoint()], logger=CSVLogger(tmp_path, name="runs"))
    assert files(tmp_path / "runs" / "version_0" / "checkpoints") == [f"epoch=0-step={BATCHES}.ckpt"]


@pytest.mark.parametrize(("mode", "kept"), [("min", [1, 3]), ("max", [0, 2])])
def test_the_best_are_kept(tmp_path, mode, kept):
    scores = (3.0, 1.0, 2.0, 0.5)
    checkpoint = ModelCheckpoint(tmp_path / "best", "{epoch}", monitor="score", mode=mode, save_top_k=2)
    trained(tmp_path, [checkpoint], Regression(scores), epochs=4)
    assert files(tmp_path / "best") == [f"epoch={epoch}.ckpt" for epoch in kept]
    best = (min if mode == "min" else max)(scores)
    assert checkpoint.best_model_score == best
    assert checkpoint.best_model_path.endswith(f"epoch={scores.index(best)}.ckpt")
    assert {float(score) for score in checkpoint.best_k_models.values()} == {scores[epoch] for epoch in kept}
    assert checkpoint.kth_best_model_path in checkpoint.best_k_models


@pytest.mark.filterwarnings("ignore:step")
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_score_that_is_not_finite_is_never_among_the_best(tmp_path, mode):
    scores = (float("nan"), 1.0, float("inf"), 2.0, float("-inf"))
    checkpoint = ModelCheckpoint(tmp_path / "best", "{epoch}", monitor="score", mode=mode, save_top_k=3)
    trained(tmp_path, [checkpoint], Regression(scores), epochs=5)
    assert files(tmp_path / "best") == ["epoch=1.ckpt", "epoch=3.ckpt"]


@pytest.mark.filterwarnings("ignore:step")
def test_weights_that_are_not_finite_replace_no_checkpoint(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "kept", save_last=True)
    with pytest.warns(UserWarning, match="weights are not finite"):
        trained(tmp_path, [checkpoint], Regression(bad_steps=[BATCHES + 1]), epochs=3)
    assert files(tmp_path / "kept") == [f"epoch=0-step={BATCHES}.ckpt", "last.ckpt"]
    assert checkpoint.best_model_path.endswith(f"epoch=0-step={BATCHES}.ckpt")


def test_every_n_steps_with_accumulation(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "all", "{step}", every_n_train_steps=2, save_top_k=-1)
    trained(tmp_path, [checkpoint], epochs=3, accumulate_grad_batches=2)
    assert files(tmp_path / "all") == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]


def test_a_save_by_steps_waits_for_the_metric_that_validation_brings(tmp_path):
    checkpoint = ModelCheckpoint(
        tmp_path / "all", "{step}-{score:.0f}", monitor="score", every_n_train_steps=BATCHES, save_top_k=-1,
        save_on_train_epoch_end=False,
    )  # fmt: skip
    trained(tmp_path, [checkpoint], Regression((7, 8)), epochs=2)
    assert files(tmp_path / "all") == [f"step={BATCHES}-score=7.ckpt", f"step={2 * BATCHES}-score=8.ckpt"]


def test_every_n_epochs(tmp_path):
    trained(tmp_path, [ModelCheckpoint(tmp_path / "all", "{epoch}", every_n_epochs=2, save_top_k=-1)], epochs=5)
    assert files(tmp_path / "all") == ["epoch=1.ckpt", "epoch=3.ckpt"]


def test_by_time(tmp_path):
    often = ModelCheckpoint(tmp_path / "often", "{step}", train_time_interval=timedelta(0), save_top_k=-1)
    never = ModelCheckpoint(tmp_path / "never", "{step}", train_time_interval=timedelta(days=1), save_top_k=-1)
    trained(tmp_path, [often, never], epochs=1)
    assert files(tmp_path / "often") == [f"step={step}.ckpt" for step in range(1, BATCHES + 1)]
    assert not (tmp_path / "never").exists()


def test_last(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "kept", "{epoch}", monitor="score", save_last=True)
    trained(tmp_path, [checkpoint], Regression((1.0, 0.5)), epochs=2)
    assert files(tmp_path / "kept") == ["epoch=1.ckpt", "last.ckpt"]
    assert checkpoint.last_model_path == str(tmp_path / "kept" / "last.ckpt")


def test_last_as_a_link(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "kept", "{epoch}", save_last="link")
    trained(tmp_path, [checkpoint], epochs=2)
    assert files(tmp_path / "kept") == ["epoch=1.ckpt", "last.ckpt"]
    assert os.path.realpath(tmp_path / "kept" / "last.ckpt") == str(tmp_path / "kept" / "epoch=1.ckpt")


def test_a_name_that_is_taken_gets_a_version(tmp_path):
    for _ in range(2):
        trained(tmp_path, [ModelCheckpoint(tmp_path / "kept", "model")])
    assert files(tmp_path / "kept") == ["model-v1.ckpt", "model.ckpt"]
    trained(tmp_path, [ModelCheckpoint(tmp_path / "kept", "model", enable_version_counter=False)])
    assert files(tmp_path / "kept") == ["model-v1.ckpt", "model.ckpt"]


class Crash(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 2:
            raise RuntimeError("out of luck")


def test_on_exception(tmp_path):
    with pytest.raises(RuntimeError, match="out of luck"):
        trained(tmp_path, [Crash(), ModelCheckpoint(tmp_path / "kept", "{step}", save_on_exception=True)])
    assert files(tmp_path / "kept") == ["step=2.ckpt"]


def test_a_resumed_run_goes_on_with_the_best(tmp_path):
    scores = (1.0, 5.0, 3.0, 0.5)

    def checkpoint():
        return ModelCheckpoint(tmp_path / "kept", "{epoch}", monitor="score", save_top_k=2)

    first = checkpoint()
    trained(tmp_path, [first], Regression(scores), epochs=2)
    assert files(tmp_path / "kept") == ["epoch=0.ckpt", "epoch=1.ckpt"]
    second = checkpoint()
    trained(tmp_path, [second], Regression(scores), epochs=4, ckpt_path=tmp_path / "kept" / "epoch=1.ckpt")
    assert {os.path.basename(path): float(score) for path, score in second.best_k_models.items()} == {
        "epoch=0.ckpt": 1.0,
        "epoch=3.ckpt": 0.5,
    }
    # epoch=1 is not among the best any more, but it is what this run went on from
    assert files(tmp_path / "kept") == ["epoch=0.ckpt", "epoch=1.ckpt", "epoch=3.ckpt"]


def test_a_resumed_run_goes_on_with_its_own_last(tmp_path):
    for epochs, start in ((1, None), (2, tmp_path / "kept" / "epoch=0.ckpt")):
        checkpoint = ModelCheckpoint(tmp_path / "kept", "{epoch}", save_last=True, save_top_k=-1)
        trained(tmp_path, [checkpoint], epochs=epochs, ckpt_path=start)
    assert files(tmp_path / "kept") == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]


def test_a_new_trainer_finds_the_last_checkpoint_of_the_run_before(tmp_path):
    trained(tmp_path, [ModelCheckpoint()], epochs=2, logger=CSVLogger(tmp_path))
    trainer = trained(tmp_path, [ModelCheckpoint()], epochs=3, logger=CSVLogger(tmp_path), ckpt_path="last")
    assert trainer.global_step == 3 * BATCHES
    assert files(tmp_path / "hasten_logs") == ["version_0", "version_1"]
    assert files(tmp_path / "hasten_logs" / "version_1" / "checkpoints") == [f"epoch=2-step={3 * BATCHES}.ckpt"]


@pytest.mark.filterwarnings("ignore:step")
def test_who_keeps_all_keeps_those_without_a_finite_score_unranked(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "kept", "{epoch}", monitor="score", save_top_k=-1)
    trained(tmp_path, [checkpoint], Regression((float("nan"), 1.0)), epochs=2)
    assert files(tmp_path / "kept") == ["epoch=0.ckpt", "epoch=1.ckpt"]
    assert checkpoint.best_model_path.endswith("epoch=1.ckpt")


def test_nothing_is_saved_in_a_dry_run(tmp_path):
    trained(
        tmp_path, [ModelCheckpoint(tmp_path / "kept", save_last=True)], fast_dev_run=True, enable_checkpointing=None
    )
    assert not (tmp_path / "kept").exists()


def test_a_metric_nobody_logs_is_an_error_that_names_the_likely_one(tmp_path):
    with pytest.raises(HastenError, match="did you mean 'val_loss'"):
        trained(tmp_path, [ModelCheckpoint(monitor="valid_loss")])


@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "best"}, {"save_top_k": -2}, {"save_top_k": 3}, {"every_n_train_steps": -1},
        {"every_n_train_steps": 1, "every_n_epochs": 1},
        {"every_n_epochs": 1, "train_time_interval": timedelta(1)},
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense(arguments):
    with pytest.raises(HastenError, match="ModelCheckpoint"):
        ModelCheckpoint(**arguments)


@pytest.mark.parametrize(
    ("template", "insert", "name"),
    [
        (None, True, "epoch=2-step=40.ckpt"),
        ("{epoch:02d}-{val/loss:.2f}", True, "epoch=02-val/loss=0.12.ckpt"),
        ("e{epoch}-l{val/loss:.1f}", False, "e2-l0.1.ckpt"),
        ("{val.acc:.3f}", True, "val.acc=0.500.ckpt"),
        ("{epoch}-{epoch_test}", True, "epoch=2-epoch_test=7.ckpt"),
        ("{missing:d}", True, "missing=0.ckpt"),
        ("plain", True, "plain.ckpt"),
    ],
)
def test_names(template, insert, name):
    metrics = {
        "epoch": 2, "step": 40, "val/loss": torch.tensor(0.123), "val.acc": torch.tensor(0.5), "epoch_test": 7,
    }  # fmt: skip
    checkpoint = ModelCheckpoint(filename=template, auto_insert_metric_name=insert)
    assert checkpoint.format_checkpoint_name(metrics) == name


def test_a_malformed_name_is_an_error():
    with pytest.raises(HastenError, match="filename"):
        ModelCheckpoint(filename="{epoch:.zf}").format_checkpoint_name({"epoch": 1})
