"""The losses of a run that is tuned: what is wrong with them is said, and ordinary ones pass."""

from __future__ import annotations

import math
import random

import torch

from hasten.online.losses import Losses


def saw(losses: Losses, values: list[float]) -> None:
    for value in values:
        losses.add([torch.tensor(value)])


def test_losses_that_fall_or_scatter_as_before_are_right() -> None:
    lot, losses = random.Random(0), Losses()
    for block in range(30):
        saw(losses, [2.0 / (1 + block) + lot.uniform(-0.5, 0.5) for _ in range(10)])
        assert losses.problem(on=block > 2, watched=block > 2) == ""


def test_losses_above_all_before_are_wrong_where_they_are_watched() -> None:
    for watched in (True, False):
        losses = Losses()
        saw(losses, [1.0, 0.8, 0.9, 0.7])
        assert losses.problem(on=False, watched=False) == ""
        saw(losses, [1.0, 1.8, 2.0, 1.9])
        said = losses.problem(on=True, watched=watched)
        assert said == ("the loss rose to 1.675; the steps before had 0.7 to 1" if watched else "")


def test_nan_is_wrong_unless_it_was_there_before() -> None:
    losses = Losses()
    saw(losses, [1.0, math.inf, 1.0])
    assert "infinity" in losses.problem(on=True, watched=False)
    assert losses.problem(on=True, watched=False) == ""  # nothing new was seen
    saw(losses, [math.nan])
    assert losses.problem(on=False, watched=False) == ""
    saw(losses, [math.nan])
    assert losses.problem(on=True, watched=True) == ""


def test_the_losses_of_a_step_are_added() -> None:
    losses = Losses()
    for _ in range(5):
        losses.add([torch.tensor([1.0, 3.0]), torch.tensor(1.0)])
    losses.problem(on=False, watched=False)
    losses.add([torch.tensor(30.0)])
    assert losses.problem(on=True, watched=True) == "the loss rose to 30; the steps before had 3 to 3"
