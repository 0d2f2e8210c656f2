"""Flags of the Trainer that say for how long, on how many batches, and when it is validated."""

import time
from datetime import timedelta

import pytest
import torch

import hasten
from hasten.callbacks import Timer
from tests.trainer.flags.trained import Counting, StopsAt, fitted
from tests.trainer.trainings import Regression, dataset, loader, quiet

pytestmark = pytest.mark.filterwarnings("ignore")


def test_fast_dev_run(tmp_path):
    for batches in (True, 2):
        module = Counting()
        trainer = quiet(
            fast_dev_run=batches, max_epochs=5, min_epochs=3, logger=True, enable_checkpointing=True,
            default_root_dir=tmp_path, max_steps=50, limit_train_batches=0.5,
        )  # fmt: skip
        trainer.fit(module, loader(), loader())
        trainer.test(module, loader(), verbose=False)
        trainer.predict(module, loader())
        expected = {stage: int(batches) for stage in ("train", "validate", "test", "predict")}
        assert {stage: module.count(stage) for stage in module.steps} == {**expected, "sanity_check": 0}
    assert list(tmp_path.iterdir()) == []


def test_max_epochs(tmp_path):
    assert fitted(max_epochs=3).count("train") == 12
    assert fitted(max_epochs=0).count("train") == 0
    with pytest.warns(UserWarning, match="1000 epochs"):
        assert _quiet_default().max_epochs == 1000
    endless = Counting()
    quiet(max_epochs=-1, callbacks=StopsAt(50)).fit(endless, loader())
    assert endless.count("train") == 50


def _quiet_default():
    trainer = quiet(max_epochs=None, callbacks=StopsAt(1))
    trainer.fit(Regression(), loader())
    return trainer


def test_min_epochs(tmp_path):
    assert fitted(max_epochs=5, min_epochs=3, callbacks=StopsAt(2)).count("train") == 12
    assert fitted(max_epochs=5, callbacks=StopsAt(2)).count("train") == 2


def test_max_steps(tmp_path):
    assert fitted(max_epochs=None, max_steps=6).count("train") == 6
    assert fitted(max_steps=3, max_epochs=9, accumulate_grad_batches=2).count("train") == 6
    assert fitted(max_steps=0).count("train") == 0
    assert fitted(max_steps=99, max_epochs=1).count("train") == 4


def test_min_steps(tmp_path):
    assert fitted(max_epochs=5, min_steps=7, callbacks=StopsAt(2)).count("train") == 7


def test_max_time(tmp_path):
    for duration in ("00:00:00:01", timedelta(seconds=0.3), {"seconds": 0.3}):
        trainer = quiet(max_epochs=-1, max_time=duration)
        assert any(isinstance(callback, Timer) for callback in trainer.callbacks)
        begin = time.monotonic()
        trainer.fit(Regression(), loader())
        assert time.monotonic() - begin >= 0.3
        assert trainer.global_step > 0
    assert (
        quiet(max_time="01:02:03:04").callbacks[-1].time_remaining()
        == timedelta(days=1, hours=2, minutes=3, seconds=4).total_seconds()
    )


def test_limit_train_batches(tmp_path):
    assert [fitted(limit_train_batches=limit).count("train") for limit in (3, 0.5, 1.0, 99, 1)] == [3, 2, 4, 4, 1]
    for nothing in (0, 0.0):
        module = fitted(validation=loader(), limit_train_batches=nothing)
        assert module.count("train") == module.count("validate") == 0
    with pytest.raises(hasten.HastenError, match=r"limit_train_batches=0.1 of 4 batches"):
        fitted(limit_train_batches=0.1)


def test_limit_val_batches(tmp_path):
    def validated(limit):
        return fitted(validation=loader(), limit_val_batches=limit, num_sanity_val_steps=0).count("validate")

    assert [validated(limit) for limit in (3, 0.5, 1.0, 99, 0, 0.0)] == [3, 2, 4, 4, 0, 0]


def test_limit_test_batches(tmp_path):
    for limit, count in ((3, 3), (0.5, 2), (1.0, 4), (0, 0)):
        module = Counting()
        results = quiet(limit_test_batches=limit).test(module, loader(), verbose=False)
        assert module.count("test") == count
        assert bool(results) == bool(count)


def test_limit_predict_batches(tmp_path):
    for limit, count in ((3, 3), (0.5, 2), (1.0, 4), (0, 0)):
        assert len(quiet(limit_predict_batches=limit).predict(Regression(), loader())) == count


def test_overfit_batches(tmp_path):
    class Batches(Regression):
        seen = None

        def training_step(self, batch, batch_idx):
            self.seen.append(batch[0])
            return super().training_step(batch, batch_idx)

    for given, count in ((2, 2), (0.5, 2), (1.0, 4)):
        Batches.seen = seen = []
        module = Batches()
        with pytest.warns(UserWarning, match="shuffling"):
            quiet(max_epochs=2, overfit_batches=given).fit(module, loader(shuffle=True))
        assert len(seen) == 2 * count
        for first, second in zip(seen[:count], seen[count:]):
            assert torch.equal(first, second)
        assert torch.equal(seen[0], dataset()[:8][0])


def test_val_check_interval(tmp_path):
    def validated_at(interval, epochs=2, **flags):
        return fitted(validation=loader(), val_check_interval=interval, max_epochs=epochs, **flags).validated_at

    assert validated_at(2) == [2, 4, 6, 8]
    assert validated_at(3) == [3, 7]
    assert validated_at(1) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert validated_at(0.25, epochs=1) == [1, 2, 3, 4]
    assert validated_at(0.5) == [2, 4, 6, 8]
    assert validated_at(1.0) == [4, 8]
    assert validated_at(3, check_val_every_n_epoch=None) == [3, 6]
    assert validated_at(6, check_val_every_n_epoch=None) == [6]
    assert validated_at("00:00:00:00", epochs=1) == [1, 2, 3, 4]
    assert validated_at({"milliseconds": 0}, epochs=1) == [1, 2, 3, 4]
    assert validated_at(timedelta(hours=1)) == []


def test_check_val_every_n_epoch(tmp_path):
    module = fitted(validation=loader(), check_val_every_n_epoch=2, max_epochs=5)
    assert sorted(set(module.steps["validate"])) == [1, 3]
    module = fitted(validation=loader(), check_val_every_n_epoch=None, max_epochs=3, val_check_interval=5)
    assert module.validated_at == [5, 10]


def test_num_sanity_val_steps(tmp_path):
    for steps, count in ((None, 2), (0, 0), (3, 3), (99, 4), (-1, 4)):
        module = fitted(validation=loader(), num_sanity_val_steps=steps)
        assert module.count("sanity_check") == count
        assert module.count("validate") == 4


def test_reload_dataloaders_every_n_epochs(tmp_path):
    class Own(Regression):
        asked = None

        def train_dataloader(self):
            self.asked.append(("train", self.trainer.current_epoch))
            return loader()

        def val_dataloader(self):
            self.asked.append(("val", self.trainer.current_epoch))
            return loader()

    for every, train, val in ((0, [0], [0]), (1, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), (2, [0, 2, 4], [0, 2, 4])):
        Own.asked = []
        quiet(max_epochs=5, reload_dataloaders_every_n_epochs=every).fit(Own())
        assert [epoch for kind, epoch in Own.asked if kind == "train"] == train
        assert [epoch for kind, epoch in Own.asked if kind == "val"] == val
