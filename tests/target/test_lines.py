"""Numbers of printed lines, as scripts of the field print them, and which of them a goal means."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten import HastenError
from hasten.target.goal import Goal, parse_goal
from hasten.target.readings import LOGGED, PRINTED, Readings, fits, normalized_words, numbers_of

# A line, a name that a person may give, and its value there.
SAID = {
    "stone age": ("epoch 3: 1.203 s train, loss 1.2, validation loss 1.93, accuracy 0.5", "val_loss", 1.93),
    "nanoGPT": ("step 250: train loss 2.1, val loss 2.2", "val_loss", 2.2),
    "Hugging Face": ("{'eval_loss': 1.93, 'eval_accuracy': 0.5, 'epoch': 1.0}", "eval_loss", 1.93),
    "torch's MNIST": ("Test set: Average loss: 0.0312, Accuracy: 9897/10000 (99%)", "test accuracy", 0.9897),
    "torch's MNIST, loss": ("Test set: Average loss: 0.0312, Accuracy: 9897/10000 (99%)", "test_loss", 0.0312),
    "torch's ImageNet": (" * Acc@1 71.23 Acc@5 90.1", "acc@1", 71.23),
    "tqdm": ("Epoch 3:  45%|####      | 45/100 [00:12<00:15,  3.6it/s, val_loss=1.9]", "val_loss", 1.9),
    "one head for several": ("Epoch 1 | train: loss 0.5 acc 0.9 | val: loss 0.4 acc 0.8", "val_acc", 0.8),
    "logging": ("2026-11-22 22:55:01,123 INFO epoch 3 val_loss 1.9", "val_loss", 1.9),
    "Keras": ("Epoch 1/10 - 12s - loss: 0.3 - val_loss: 0.2 - val_accuracy: 97.3%", "val_accuracy", 97.3),
    "a table": ("Acc@1   3.0 (  2.2)", "Acc@1", 3.0),
    "camel case": ("valLoss=2e-1", "val_loss", 0.2),
    "words": ("Validation Loss: 1.9 | Val. Accuracy: 90", "validation loss", 1.9),
    "TensorBoard": ("Loss/val: -0.25", "val_loss", -0.25),
    "colours": ("\x1b[1mval loss\x1b[0m: \x1b[32m0.5\x1b[0m", "val_loss", 0.5),
}


@pytest.mark.parametrize("case", SAID.values(), ids=SAID.keys())
def test_a_name_finds_its_number(case: tuple[str, str, float]) -> None:
    line, name, value = case
    assert [one.value for one in numbers_of(line) if fits(normalized_words(name), one.words)] == [value]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("loss", "val loss 1.9"),
        ("loss", "train loss 1.9"),
        ("val_loss", "best val loss 1.8"),
        ("val_loss", "test loss 1.8"),
        ("val_loss", "val accuracy 0.8"),
        ("acc", "acc@5 90"),
        ("val_loss", "loss 1.9"),
    ],
)
def test_another_number_is_not_taken_for_it(name: str, line: str) -> None:
    assert not [one for one in numbers_of(line) if fits(normalized_words(name), one.words)]


def test_nan_is_a_value_and_meets_no_goal() -> None:
    (number,) = numbers_of("val_loss nan")
    assert math.isnan(number.value)
    assert not parse_goal("val_loss<=2").is_met(number.value)
    assert not parse_goal("accuracy>=0").is_met(number.value)


@given(st.text(max_size=300))
def test_any_line_can_be_read(line: str) -> None:
    for number in numbers_of(line):
        assert isinstance(number.value, float)
        assert number.words


@given(
    st.sampled_from(["val loss", "val_loss", "validation loss", "Val/Loss", "loss/val"]),
    st.floats(-1e6, 1e6, allow_nan=False),
    st.sampled_from([": ", "=", " ", " = ", ":"]),
)
def test_a_value_is_read_as_it_was_printed(label: str, value: float, between: str) -> None:
    (number,) = numbers_of(f"epoch 3, {label}{between}{value:.6g}, 12.5 s")
    assert number.words == ("loss", "val")
    assert number.value == float(f"{value:.6g}")


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("val_loss<=1.88", Goal("val_loss", True, 1.88)),
        (" accuracy >= 97 % ", Goal("accuracy", False, 97)),
        ("val loss<2e-1", Goal("val loss", True, 0.2)),
        ("acc@1>70", Goal("acc@1", False, 70)),
    ],
)
def test_goals_are_read(text: str, goal: Goal) -> None:
    assert parse_goal(text) == goal


@pytest.mark.parametrize(
    "text", ["val_loss", "1.88", "val_loss=1.88", "<=1.88", "val_loss<=low", "val_loss<=nan", "3<=4"]
)
def test_what_is_no_goal_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(HastenError, match="not NAME<=VALUE") as error:
        parse_goal(text)
    assert 'write --target "val_loss<=1.88"' in error.value.fix


def heard(goal: str, *lines: str, only: str = "", logged: tuple[str, ...] = ()) -> Readings:
    readings = Readings(parse_goal(goal), only)
    for second, line in enumerate(lines):
        readings.add_line(PRINTED, line, float(second))
    for second, line in enumerate(logged):
        readings.add_line(LOGGED, line, float(second))
    return readings


def test_the_exact_name_goes_first_then_print_before_log_then_what_is_repeated() -> None:
    both = heard("val_loss<=1", "val loss 2", "fold val loss 3", "val loss 1", logged=("val/loss: 2",))
    assert (both.choose_kind().label, both.choose_kind().source) == ("val loss", PRINTED)
    summed_up = heard("val_loss<=1", "epoch 1 val loss 2", "epoch 2 val loss 1", "Finished: val loss 1")
    assert summed_up.choose_kind().head == "epoch"
    assert [one.value for one in summed_up.of_kind(summed_up.choose_kind())] == [2, 1]
    assert heard("val_loss<=1", logged=("val/loss: 2",)).choose_kind().source == LOGGED


def test_what_was_never_reported_is_refused_and_what_was_is_named() -> None:
    with pytest.raises(HastenError, match="reported no 'val_loss'; it reported 'loss'"):
        heard("val_loss<=1", "loss 3").choose_kind()
    with pytest.raises(HastenError, match="nor any other number with a name"):
        heard("val_loss<=1", "hello").choose_kind()


def test_two_kinds_of_line_with_the_same_name_are_refused_until_one_is_named() -> None:
    lines = ["Epoch: [0][10/50]\tAcc@1  3.0 ( 2.2)", "Test: [10/20]\tAcc@1  2.0 ( 2.1)"] * 2
    with pytest.raises(HastenError, match="may be one of 2 numbers") as error:
        heard("Acc@1>=1", *lines).choose_kind()
    assert "--target-line" in error.value.fix
    assert heard("Acc@1>=1", *lines, only="Test").choose_kind().head == "Test"


@given(st.booleans(), st.floats(-1e6, 1e6, allow_nan=False))
def test_a_goal_within_reach_is_reached_and_close(falls: bool, best: float) -> None:
    goal = Goal("x", falls, 0.0).within_reach_of(best)
    assert goal.is_met(best)
    assert goal.value == pytest.approx(best, rel=0.011)
    assert parse_goal(str(goal)).is_met(best) or len(f"{goal.value:g}") >= 6


def test_a_share_is_told_from_percent() -> None:
    assert parse_goal("accuracy>=0.97").looks_like_percent([93.0])
    assert not parse_goal("accuracy>=0.97").looks_like_percent([0.93])
    assert not parse_goal("val_loss<=0.97").looks_like_percent([93.0])
