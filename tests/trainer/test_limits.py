"""Limits of a fit beyond one flag: loaders without an end or a length, minimums, shares of an epoch."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader

import hasten
from tests.trainer.flags.trained import StopsAt, fitted
from tests.trainer.trainings import dataset, loader, quiet


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            x = torch.randn(4, generator=generator)
            yield x, x.sum(0, keepdim=True)


def test_a_loader_without_end_needs_a_limit():
    batches = DataLoader(Endless(), batch_size=8)
    module = fitted(batches=batches, limit_train_batches=5, max_epochs=2)
    assert module.count("train") == 10
    assert fitted(batches=batches, max_epochs=-1, max_steps=7).count("train") == 7
    with pytest.raises(hasten.HastenError, match="limit_train_batches"):
        fitted(batches=batches, limit_train_batches=0.5)


def test_a_loader_without_length_is_known_to_end_only_when_it_does():
    class Some(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([dataset()[i] for i in range(32)])

    module = fitted(
        batches=DataLoader(Some(), batch_size=8), validation=loader(), accumulate_grad_batches=3, max_epochs=2
    )
    assert module.count("train") == 8
    assert module.trainer.global_step == 4  # 3 + 1, twice
    assert module.validated_at == [2, 4]


def test_max_steps_within_an_epoch_leaves_the_rest():
    trainer = fitted(max_steps=6, max_epochs=9).trainer
    assert (trainer.global_step, trainer.current_epoch) == (6, 2)


def test_minimum_of_epochs_and_steps_is_announced_once(capsys):
    fitted(max_epochs=5, min_epochs=3, callbacks=StopsAt(1))
    assert capsys.readouterr().err.count("min_epochs=3") == 1


def test_ones_are_spelled_out(capsys):
    quiet(limit_train_batches=1, limit_val_batches=1.0)
    err = capsys.readouterr().err
    assert "limit_train_batches=1)` was configured so 1 batch" in err
    assert "limit_val_batches=1.0)` was configured so 100% of the batches" in err


def test_a_share_of_the_epoch_and_a_limit_work_together():
    module = fitted(batches=loader(80), validation=loader(),
                    limit_train_batches=0.8, val_check_interval=0.5)  # fmt: skip
    assert (module.count("train"), module.validated_at) == (8, [4, 8])


def test_what_is_said_goes_through_logging_where_that_is_set_up(caplog, capsys):
    with caplog.at_level(logging.INFO, logger="hasten"):
        fitted()
    assert "max_epochs=1 reached" in caplog.text
    assert capsys.readouterr().err == ""


def test_variables_of_a_framework_that_is_not_imported_say_nothing(monkeypatch):
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "7")
    assert hasten.Trainer().max_epochs is None
