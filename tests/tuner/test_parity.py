"""Parity: a planted difference is found, and what is alike passes."""

from __future__ import annotations

import random

import pytest

from hasten.tuner.parity import parity_of
from hasten.tuner.trial import Trial
from tests.tuner.evidence import with_losses


def side(draw: random.Random, seeds: int, shift: float = 0.0, validation: bool = True, steps: int = 40) -> list[Trial]:
    """Trials whose losses fall from 2 towards 1, with a level of their own for each seed."""
    trials = []
    for seed in range(seeds):
        level = draw.gauss(1.0 + shift, 0.05)
        losses = [level + 1 / (1 + step) + draw.gauss(0, 0.02) for step in range(steps)]
        seen = with_losses(losses, level + 0.1 if validation else None)
        trials.append(Trial({}, seed, "ok", 1.0, evidence=seen))
    return trials


def test_the_same_distribution_passes() -> None:
    """In 99 of 100 by design, for each of two checks; here 100 tries."""
    draw = random.Random(1)
    assert sum(parity_of(side(draw, 5), side(draw, 5)).ok for _ in range(100)) >= 94


@pytest.mark.parametrize("shift", [0.5, -0.5])
def test_a_planted_difference_is_found(shift: float) -> None:
    """Ten times the seeds' spread, upwards or downwards."""
    draw = random.Random(2)
    assert sum(parity_of(side(draw, 5), side(draw, 5, shift)).ok for _ in range(50)) == 0


def test_a_difference_in_validation_alone_is_found() -> None:
    draw = random.Random(3)
    a, b = side(draw, 5), side(draw, 5)
    worse = [Trial({}, t.seed, "ok", 1.0, evidence=with_losses(list(t.evidence.losses), 3.0)) for t in b if t.evidence]
    found = parity_of(a, worse)
    assert not found.ok
    assert {check.what: check.ok for check in found.checks} == {"training loss": True, "validation loss": False}


def test_runs_that_agree_to_rounding_are_alike() -> None:
    """A script with fixed seeds everywhere has no spread of its own; rounding is no change of its result."""
    losses = [1.0 / (1 + step) + 0.5 for step in range(20)]
    a = [Trial({}, seed, "ok", 1.0, evidence=with_losses(losses)) for seed in range(3)]
    b = [Trial({}, t.seed, "ok", 1.0, evidence=with_losses([x * 1.0001 for x in losses])) for t in a]
    assert parity_of(a, b).ok
    c = [Trial({}, t.seed, "ok", 1.0, evidence=with_losses([x * 1.01 for x in losses])) for t in a]
    assert not parity_of(a, c).ok


def test_what_cannot_be_compared_is_not_called_alike() -> None:
    draw = random.Random(4)
    assert not parity_of(side(draw, 2), side(draw, 5)).ok
    assert "one seed proves nothing" in parity_of(side(draw, 5), side(draw, 2)).note
    assert not parity_of([], []).ok
    nan = Trial({}, 1, "nan", 1.0, "3 losses were NaN or infinite")
    assert not parity_of(side(draw, 3), [*side(draw, 2), nan]).ok
    silent = [Trial({}, s, "ok", 1.0, evidence=with_losses([]) if s < 0 else None) for s in range(3)]
    assert not parity_of(silent, silent).ok


def test_without_validation_that_is_said() -> None:
    draw = random.Random(5)
    found = parity_of(side(draw, 5, validation=False), side(draw, 5, validation=False))
    assert found.ok
    assert [check.what for check in found.checks] == ["training loss"]
    assert "only training was compared" in found.note


def test_sides_of_unequal_length_are_compared_over_what_both_have() -> None:
    """A faster side trains further in the same time, to lower losses; that is no difference."""
    draw = random.Random(6)
    assert sum(parity_of(side(draw, 5, steps=20), side(draw, 5, steps=200)).ok for _ in range(30)) >= 27
