"""EarlyStopping: when a training ends."""

import pytest

from hasten import HastenError
from hasten.trainer.callbacks import EarlyStopping, EarlyStoppingReason, ModelCheckpoint
from tests.trainer.callbacks.trainings import Regression, trained

NAN = float("nan")


@pytest.mark.parametrize(
    ("arguments", "scores", "epochs", "reason"),
    [
        ({"patience": 2}, (3, 2, 2, 2, 1), 4, "PATIENCE_EXHAUSTED"),
        ({"patience": 2}, (5, 4, 3, 2, 1), 5, "NOT_STOPPED"),
        ({"patience": 2, "mode": "max"}, (1, 2, 1, 1, 9), 4, "PATIENCE_EXHAUSTED"),
        ({"patience": 1, "min_delta": 0.5}, (3, 2.7, 1, 1, 1), 2, "PATIENCE_EXHAUSTED"),
        ({}, (3, NAN, 1, 1, 1), 2, "NON_FINITE_METRIC"),
        ({"check_finite": False, "patience": 3}, (3, NAN, 1, 1, 1), 5, "NOT_STOPPED"),
        ({"stopping_threshold": 2.5}, (4, 3, 2, 1, 1), 3, "STOPPING_THRESHOLD"),
        ({"divergence_threshold": 10}, (4, 11, 2, 1, 1), 2, "DIVERGENCE_THRESHOLD"),
    ],
)
def test_when_it_stops(tmp_path, arguments, scores, epochs, reason):
    stopping = EarlyStopping("score", **arguments)
    trainer = trained(tmp_path, [stopping], Regression(scores), epochs=5)
    assert trainer.current_epoch == epochs
    assert stopping.stopping_reason is EarlyStoppingReason[reason]
    assert stopping.stopped_epoch == (0 if reason == "NOT_STOPPED" else epochs - 1)


def test_a_training_metric_will_do(tmp_path):
    stopping = EarlyStopping("train_loss", stopping_threshold=1e9)
    assert trained(tmp_path, [stopping], epochs=5, validate=False).current_epoch == 1


def test_a_missing_metric_is_named_with_the_likely_one(tmp_path):
    with pytest.raises(HastenError, match="did you mean 'val_loss'"):
        trained(tmp_path, [EarlyStopping("vall_loss")])
    trained(tmp_path, [EarlyStopping("vall_loss", strict=False)])


def test_a_resumed_run_waits_on(tmp_path):
    scores = (1, 2, 2, 2, 2, 2)
    checkpoint = ModelCheckpoint(tmp_path / "kept", save_last=True)
    trained(tmp_path, [EarlyStopping("score"), checkpoint], Regression(scores), epochs=2)
    stopping = EarlyStopping("score")
    checkpoint = ModelCheckpoint(tmp_path / "kept", save_last=True)
    last = tmp_path / "kept" / "last.ckpt"
    trainer = trained(tmp_path, [stopping, checkpoint], Regression(scores), epochs=6, ckpt_path=last)
    assert trainer.current_epoch == 4
    assert stopping.wait_count == 3
    assert stopping.best_score == 1


def test_what_it_says(tmp_path, capfd):
    trained(tmp_path, [EarlyStopping("score", patience=1, verbose=True)], Regression((1, 2)), epochs=3)
    said = capfd.readouterr().err
    assert "score = 1 improved" in said
    assert "without improvement" in said


def test_no_such_mode():
    with pytest.raises(HastenError, match="mode"):
        EarlyStopping("a", mode="auto")
