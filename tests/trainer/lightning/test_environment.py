"""Flags that Lightning's Trainer takes from the environment: the same values under hasten's."""

import logging

import pytest

import hasten
from tests.trainer.lightning.sides import TRAINERS, L

pytestmark = pytest.mark.filterwarnings("ignore")

VARIABLES = {
    "PL_TRAINER_MAX_EPOCHS": "7",
    "PL_TRAINER_LOGGER": "False",
    "PL_TRAINER_VAL_CHECK_INTERVAL": "0.5",
    "PL_TRAINER_MAX_TIME": "00:01:30:00",
    "PL_TRAINER_PRECISION": "bf16-mixed",
    "PL_TRAINER_LOG_EVERY_N_STEPS": "",
}


@pytest.fixture
def said(caplog):
    """What the Trainer says through Lightning's logger, which hands nothing on to the root's."""
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def flags_of(trainer):
    return trainer.max_epochs, trainer.logger, trainer.val_check_interval, trainer.precision, trainer.log_every_n_steps


def test_flags_that_are_not_given_come_from_the_environment_as_under_lightning(monkeypatch, said):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    ours, theirs = (kind(accelerator="cpu") for kind in (TRAINERS["hasten"], TRAINERS["lightning"]))
    assert flags_of(ours) == flags_of(theirs) == (7, None, 0.5, "bf16-mixed", 50)
    assert "PL_TRAINER_MAX_EPOCHS is set: max_epochs=7" in said.text


def test_flags_that_are_given_win(monkeypatch, said):
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "7")
    monkeypatch.setenv("PL_TRAINER_LOGGER", "True")
    trainer = hasten.Trainer(max_epochs=2, logger=False)
    assert (trainer.max_epochs, trainer.logger) == (2, None)
    assert "PL_TRAINER" not in said.text


def test_a_wrong_value_is_refused_as_the_flag_of_that_value(monkeypatch):
    monkeypatch.setenv("PL_TRAINER_CHECK_VAL_EVERY_N_EPOCH", "1.2")
    refusal = "`check_val_every_n_epoch` should be an int >= 1"
    with pytest.raises(hasten.HastenError, match=refusal) as error:
        hasten.Trainer()
    assert isinstance(error.value, L.utilities.exceptions.MisconfigurationException)
    assert error.value.__notes__ == ["PL_TRAINER_CHECK_VAL_EVERY_N_EPOCH is set: check_val_every_n_epoch=1.2"]


def test_the_class_names_the_variables_as_under_lightning(monkeypatch):
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "7")
    monkeypatch.setenv("PL_MY_MAX_EPOCHS", "5")
    sides = [type("My", (TRAINERS[side],), {})(accelerator="cpu", logger=False) for side in ("hasten", "lightning")]
    assert [trainer.max_epochs for trainer in sides] == [5, 5]


@pytest.mark.parametrize("name", ["logger", "profiler", "plugins"])
def test_what_is_refused_later_names_its_variable_too(monkeypatch, name):
    monkeypatch.setenv(f"PL_TRAINER_{name.upper()}", "{[]: 1}")
    with pytest.raises(hasten.HastenError) as error:
        hasten.Trainer(accelerator="cpu")
    assert error.value.__notes__ == [f"PL_TRAINER_{name.upper()} is set: {name}='{{[]: 1}}'"]


def test_flags_that_lightning_does_not_have_are_not_looked_for(monkeypatch):
    monkeypatch.setenv("PL_TRAINER_SEED", "3")
    assert hasten.Trainer(accelerator="cpu", logger=False).config.seed is None
