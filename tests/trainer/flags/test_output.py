"""Flags of the Trainer that say what it shows, logs and saves."""

from pathlib import Path

import pytest
import torch

from hasten.callbacks import Callback, ModelSummary, Progress
from hasten.loggers import CSVLogger
from tests.trainer.flags.trained import Counting, Remembering, fitted
from tests.trainer.trainings import Regression, loader, quiet

pytestmark = pytest.mark.filterwarnings("ignore")


def test_logger(tmp_path):
    logger = CSVLogger(tmp_path)
    fitted(Regression(log=True), logger=logger, log_every_n_steps=1)
    assert "loss" in (Path(logger.log_dir) / "metrics.csv").read_text()
    trainer = quiet(logger=True, default_root_dir=tmp_path)
    assert isinstance(trainer.logger, CSVLogger)
    assert quiet(logger=[logger, trainer.logger]).loggers == [logger, trainer.logger]
    assert quiet(logger=False).loggers == []


def test_log_every_n_steps(tmp_path):
    for every, steps in ((None, 0), (1, 6), (2, 3), (4, 1), (0, 0)):
        logger = Remembering()
        fitted(Regression(log=True), batches=loader(48), logger=logger, log_every_n_steps=every)
        assert [step for step, values in logger.got if "loss" in values] == [
            (number + 1) * every - 1 for number in range(steps)
        ]


def test_enable_autolog_hparams(tmp_path):
    class Saved(Regression):
        def __init__(self, width=3):
            super().__init__()
            self.save_hyperparameters()

    for on, expected in ((True, {"width": 3}), (False, {})):
        logger = Remembering()
        fitted(Saved(), logger=logger, enable_autolog_hparams=on)
        assert logger.hparams == expected


def test_callbacks(tmp_path):
    class Seen(Callback):
        def on_train_start(self, trainer, module):
            self.seen = module

    one, two = Seen(), Seen()
    module = fitted(callbacks=one)
    assert one.seen is module
    fitted(callbacks=[one, two])
    assert one.seen is two.seen


def test_enable_checkpointing(tmp_path):
    quiet(enable_checkpointing=True, default_root_dir=tmp_path).fit(Regression(), loader())
    assert len(list(tmp_path.rglob("*.ckpt"))) == 1
    assert quiet(enable_checkpointing=None).checkpoint_callback is not None
    assert quiet(enable_checkpointing=False).checkpoint_callback is None


def test_enable_progress_bar(tmp_path):
    assert isinstance(quiet(enable_progress_bar=True).progress_bar_callback, Progress)
    assert isinstance(quiet(enable_progress_bar=None).progress_bar_callback, Progress)
    assert quiet(enable_progress_bar=False).progress_bar_callback is None


def test_enable_model_summary(tmp_path):
    def summaries(on):
        return [one for one in quiet(enable_model_summary=on).callbacks if isinstance(one, ModelSummary)]

    assert [len(summaries(on)) for on in (True, None, False)] == [1, 1, 0]


def test_profiler(tmp_path):
    trainer = quiet(profiler="simple")
    trainer.fit(Regression(), loader())
    calls = {label.rpartition(".")[2]: len(times) for label, times in trainer.profiler.recorded.items()}
    assert calls["training_step"] == 4
    trainer = quiet(profiler="pytorch", default_root_dir=tmp_path)
    trainer.fit(Regression(), loader(96))
    assert (tmp_path / "trace.json").is_file()


def test_barebones(tmp_path):
    flags = {"logger": None, "enable_checkpointing": None, "enable_progress_bar": None, "enable_model_summary": None}
    module = Counting(log=True)
    trainer = quiet(barebones=True, default_root_dir=tmp_path, **flags)
    trainer.fit(module, loader(), loader())
    assert (trainer.callbacks, trainer.loggers, trainer.callback_metrics) == ([], [], {})
    assert (module.count("train"), module.count("sanity_check"), module.count("validate")) == (4, 0, 4)
    assert list(tmp_path.iterdir()) == []


def test_default_root_dir(tmp_path):
    trainer = quiet(
        default_root_dir=str(tmp_path / "here"), logger=True, enable_checkpointing=True, log_every_n_steps=1
    )
    trainer.fit(Regression(log=True), loader())
    assert {path.suffix for path in (tmp_path / "here").rglob("*.*") if path.is_file()} >= {".csv", ".ckpt"}
    assert quiet(default_root_dir="~").default_root_dir == str(Path.home())
    assert quiet().default_root_dir == str(Path.cwd())


def test_checkpoint_format(tmp_path):
    for kind in ("hasten", "torch"):
        trainer = quiet(checkpoint_format=kind)
        trainer.fit(Regression(), loader())
        trainer.save_checkpoint(tmp_path / f"{kind}.ckpt")
    assert "state_dict" in torch.load(tmp_path / "torch.ckpt", weights_only=True)
    loaded = Regression.load_from_checkpoint(tmp_path / "hasten.ckpt")
    assert torch.equal(loaded.net[0].weight, trainer.model.net[0].weight)


def test_background_saves(tmp_path):
    for on in (True, False):
        trainer = quiet(
            background_saves=on, enable_checkpointing=True, callbacks=[Exists(tmp_path, on)], default_root_dir=tmp_path
        )
        trainer.fit(Regression(), loader())


class Exists(Callback):
    """Whether a save that is asked for in training is there when the call returns."""

    def __init__(self, folder, background):
        self.path = folder / f"mid{background}.ckpt"
        self.background = background

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.path)
        assert self.background or self.path.is_file()
