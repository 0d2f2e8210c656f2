"""Logged values stay on their device, unread, until somebody must have them."""

import itertools

import pytest
import torch

from hasten.callbacks import Callback
from tests.trainer.flags.trained import Remembering
from tests.trainer.trainings import Regression, loader, quiet


@pytest.fixture
def reads(monkeypatch):
    """How often a tensor was read; on a GPU each would wait for it."""
    found = []
    for name in ("item", "__float__", "__int__", "__bool__", "__index__", "tolist", "cpu", "__format__"):
        plain = getattr(torch.Tensor, name)

        def counted(self, *args, _plain=plain, _name=name, **kwargs):
            found.append(_name)
            return _plain(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    return found


class ManyLogs(Regression):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("by_step", loss)
        self.log("both", loss, on_epoch=True)
        self.log("shown", loss, prog_bar=True)
        self.log("largest", loss, on_epoch=True, on_step=False, reduce_fx="max")
        return loss


def at_batches(reads, marks):
    class Marks(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            marks.append(len(reads))

    return Marks()


def test_no_value_is_read_between_two_log_points(reads):
    marks = []
    logger = Remembering()
    quiet(logger=logger, log_every_n_steps=10, callbacks=at_batches(reads, marks)).fit(
        ManyLogs(), loader(8 * 40), loader()
    )
    steps = [after - before for before, after in itertools.pairwise(marks)]
    quiet_steps = [count for index, count in enumerate(steps) if (index + 1) % 10]
    assert len(quiet_steps) == 36
    assert quiet_steps == [0] * 36
    assert [count for index, count in enumerate(steps) if not (index + 1) % 10] == [3, 3, 3]


def test_nothing_is_read_at_all_where_nobody_asks(reads):
    marks = []
    quiet(callbacks=at_batches(reads, marks)).fit(ManyLogs(), loader(2 * 270, batch_size=2))
    assert len(set(marks)) == 1  # for longer than the values are kept one by one


def test_the_default_callbacks_read_nothing_between_log_points(reads, tmp_path):
    marks = []
    flags = {"logger": None, "enable_checkpointing": None, "enable_progress_bar": None, "enable_model_summary": None}
    quiet(default_root_dir=tmp_path, callbacks=at_batches(reads, marks), **flags).fit(ManyLogs(), loader(8 * 45))
    assert len(set(marks)) == 1
