"""How long the full training is: read off its command line, or seen in a process that came to its end."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.evidence import Evidence
from hasten.tuner.length import full_seconds, length_of, length_of_finished_run, seconds_per_epoch, steps_of, steps_seen
from hasten.tuner.timing import Timing
from tests.tuner.evidence import TRAIN, VAL, evidence

BASE = Timing((0.1,) * 4, 50, 1.0, 3.0, {})  # an epoch of 6 s
LOOSE = Timing((0.02,) * 4, None, 0.0, 3.0, {})  # 1,000 steps of 20 s

words = st.text(st.characters(categories=("Ll", "Nd"), include_characters="-=./_"), max_size=12)


@pytest.mark.parametrize(
    "words",
    [
        "--epochs 90", "--epochs=90", "-epochs 90", "epochs=90", "--num_epochs 90", "--num-epochs=90",
        "--num_train_epochs 90", "--max_epochs 90", "--max-epochs=90", "--n_epochs 90", "--nepochs 90", "--n-epochs 90",
        "--nb_epochs 90", "--total_epochs 90", "--total-epochs 90", "--epoch 90", "trainer.max_epochs=90",
        "+trainer.max_epochs=90", "--nEpochs 90", "--trainer.max_epochs 90", "training.epochs=90", "-e 90",
    ],
)  # fmt: skip
def test_ways_to_say_epochs(words: str) -> None:
    length = length_of(["train.py", "--lr", "0.1", *words.split(), "--seed", "3"], BASE)
    assert length.epochs == 90
    assert "90 on the command line" in length.known_from


@pytest.mark.parametrize(
    "words",
    [
        "", "--epochs", "--epochs many", "--epochs=", "--epochs 1.5", "--warmup-epochs 5", "--eval_epochs 5",
        "--epochs-per-eval 5", "-E 9", "--save-every-epochs 2", "--lr_epochs 3", "epochs 90", "--start-epoch 4", "90",
    ],
)  # fmt: skip
def test_what_is_no_number_of_epochs(words: str) -> None:
    length = length_of(["train.py", *words.split()], BASE)
    if words == "epochs 90":
        assert length.epochs == 90  # as some scripts take it
    else:
        assert length.epochs == 100
        assert length.known_from.startswith("assumed")


def test_what_is_assumed() -> None:
    """Ten minutes of training, and at least ten epochs; 1,000 steps count as one where there is none."""
    assert length_of(["train.py"], BASE).epochs == 100
    assert length_of(["train.py"], LOOSE).epochs == 30
    assert length_of(["train.py"], Timing((60.0,) * 4, 50, 0.0, 0.0, {})).epochs == 10
    assert length_of(["train.py"], Timing((0.0,) * 4, 0, 0.0, 0.0, {})).epochs >= 10


def test_what_was_seen_stands_in_place_of_what_was_assumed() -> None:
    """A script says `for epoch in range(4)` in its source; what its command line says is what will be run."""
    run = ended([5] * 4)
    assumed = length_of(["train.py"], BASE)
    length = length_of_finished_run(assumed, run)
    assert length.epochs == 4
    assert length.known_from == "a process of this tune came to the end of the training"
    assert steps_of(length, BASE) == 240  # epochs of 6 s in steps of 0.1 s
    named = length_of(["train.py", "--epochs", "90"], BASE)
    assert length_of_finished_run(named, run) == named


@pytest.mark.parametrize(
    "run",
    [
        None,
        evidence([], ended="finished"),  # no DataLoader
        evidence([[0.1] * 5] * 4),  # it was ended
        evidence([[0.1] * 1] * 9, ended="finished"),  # next(iter(loader)) each step
        evidence([[0.1] * 1000, [0.1] * 500], ended="finished"),  # so many steps, or a break
    ],
)
def test_what_was_seen_says_nothing_where_passes_are_cut(run: Evidence | None) -> None:
    assumed = length_of(["train.py"], BASE)
    assert length_of_finished_run(assumed, run) == assumed


def test_steps_seen() -> None:
    """A search cuts passes to a little more than half; a script that takes one batch of each has as many as it had."""
    assert steps_seen(ended([5] * 4)) == 20
    assert steps_seen(evidence([[0.1] * 600] * 2, steps=1200)) == 2000
    assert steps_seen(evidence([[0.1] * 1] * 9, steps=9)) == 18
    assert steps_seen(evidence([[0.1] * 300], loaders=(), steps=300)) == 300


def ended(batches: list[int]) -> Evidence:
    """A run that came to its end by itself, in whole passes."""
    loader = dataclasses.replace(TRAIN, batches=batches[0], samples=8 * batches[0])
    steps = [[0.1] * each for each in batches]
    return evidence(steps, validation=1.0, loaders=(loader, VAL), ended="finished", steps=sum(batches))


def test_seconds() -> None:
    assert seconds_per_epoch(BASE) == pytest.approx(6.0)
    assert seconds_per_epoch(LOOSE) == pytest.approx(20.0)
    assert full_seconds(BASE, 10) == pytest.approx(63.0)


@given(st.lists(words, max_size=6), st.integers(0, 10**6), st.lists(words, max_size=3))
def test_any_command_line_has_a_length(before: list[str], epochs: int, after: list[str]) -> None:
    assert length_of([*before, *after], BASE).epochs >= 0
    if not any("epoch" in word or word == "-e" for word in before):
        assert length_of([*before, "--epochs", str(epochs), *after], BASE).epochs == epochs
