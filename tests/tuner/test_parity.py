"""Parity of pairs: what trains alike holds, a planted difference is found, and what cannot be seen is not known."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable

import pytest

from hasten.evidence import Pass, Validation
from hasten.tuner.lag import lag_of
from hasten.tuner.parity import HARMLESS, TOLERANCE, parity_of
from hasten.tuner.proof import Answer, Parity
from hasten.tuner.trial import Trial
from tests.tuner.evidence import evidence, with_losses

HOLDS, DOES_NOT, NOT_KNOWN = Answer.HOLDS, Answer.DOES_NOT, Answer.NOT_KNOWN
Pair = tuple[Trial, Trial]


def trial(losses: list[float], seed: int = 0, validation: float | None = None) -> Trial:
    return Trial({}, seed, "ok", 1.0, evidence=with_losses(losses, validation))


def batches(draw: random.Random, steps: int) -> list[float]:
    """Losses that fall from 2 towards 1; some batches are harder than others."""
    return [1 + 1 / (1 + 0.05 * step) + draw.gauss(0, 0.1) for step in range(steps)]


def pair(draw: random.Random, change: float = 0.0, scatter: float = 0.02, apart: float = 0.0, steps: int = 160) -> Pair:
    """Two runs on the same batches.

    Their difference has a level (`change`, and by chance `apart`, which the whole pair keeps) and goes up and down
    around it, as those of real runs do: each step keeps 0.7 of the one before.
    """
    losses, swing, other = batches(draw, steps), 0.0, []
    level = draw.gauss(change, apart)
    for loss in losses:
        swing = 0.7 * swing + draw.gauss(0, scatter)
        other.append(loss * (1 + level + swing))
    seed = draw.randrange(1000)
    return trial(losses, seed), trial(other, seed)


def answers(pairs: Callable[[], list[Pair]], tries: int = 100) -> dict[Answer, float]:
    """How often each answer is given."""
    given = [parity_of(pairs()).answer for _ in range(tries)]
    return {answer: given.count(answer) / tries for answer in Answer}


def check_of(parity: Parity, what: str = "training loss") -> tuple[float, float, float, float]:
    """Change, interval, and what could be seen."""
    check = next(check for check in parity.checks if check.what == what)
    return check.change, check.low, check.high, check.detectable


# -- how often it is right --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_what_trains_alike_is_seldom_refused_and_mostly_held(count: int) -> None:
    draw = random.Random(count)
    share = answers(lambda: [pair(draw, scatter=0.01) for _ in range(count)])
    assert share[DOES_NOT] <= 0.05
    assert share[HOLDS] >= 0.8


@pytest.mark.parametrize("count", [1, 3])
def test_pairs_that_drift_apart_by_rounding_alone_are_seldom_refused(count: int) -> None:
    """Each pair keeps a level of its own, which no step of that pair can tell from a change."""
    draw = random.Random(10 + count)
    share = answers(lambda: [pair(draw, scatter=0.002, apart=0.01) for _ in range(count)])
    assert share[DOES_NOT] <= 0.05


@pytest.mark.parametrize("count", [1, 3])
def test_a_change_a_half_above_what_it_says_it_can_see_is_seen(count: int) -> None:
    """The half width of its interval has even odds; beyond it they rise fast."""
    draw = random.Random(20 + count)
    visible = statistics.median(check_of(parity_of([pair(draw) for _ in range(count)]))[3] for _ in range(40))
    limit = HARMLESS if count >= 3 else TOLERANCE
    share = answers(lambda: [pair(draw, change=limit + 1.5 * visible) for _ in range(count)], 60)
    assert share[DOES_NOT] >= 0.7
    assert share[HOLDS] == 0


def test_a_change_beyond_the_tolerance_seldom_holds_however_little_can_be_seen() -> None:
    draw = random.Random(30)
    for scatter in (0.002, 0.02, 0.1):
        assert answers(lambda s=scatter: [pair(draw, TOLERANCE, s) for _ in range(3)], 60)[HOLDS] <= 0.05  # type: ignore[misc]


def test_a_harmless_change_holds_and_noise_is_not_known() -> None:
    draw = random.Random(31)
    assert answers(lambda: [pair(draw, 0.002, 0.001)], 30)[HOLDS] == 1
    wide = parity_of([pair(draw, scatter=0.5)])
    assert wide.answer is NOT_KNOWN
    assert "could be seen" in wide.note


def test_a_lower_loss_is_said_but_no_reason_to_refuse() -> None:
    draw = random.Random(32)
    found = parity_of([pair(draw, -0.1, 0.005) for _ in range(3)])
    assert found.answer is HOLDS
    assert "training loss is lower under the plan: -" in found.note


def test_one_pair_says_that_more_would_tell() -> None:
    draw = random.Random(33)
    one = parity_of([pair(draw, 0.015, 0.002)])
    assert one.answer is NOT_KNOWN
    assert "more pairs would tell" in one.note
    assert parity_of([pair(draw, 0.015, 0.002) for _ in range(3)]).answer is DOES_NOT


def test_the_change_is_of_the_size_of_negative_losses_too() -> None:
    draw = random.Random(34)

    def negative(of: Trial) -> Trial:
        assert of.evidence is not None
        return trial([(loss or 0.0) - 5.0 for loss in of.evidence.losses])

    pairs = [(negative(a), negative(b)) for a, b in (pair(draw, 0.2, 0.002) for _ in range(3))]
    found = parity_of(pairs)
    assert found.answer is DOES_NOT
    assert check_of(found)[0] > 0


# -- what is not a loss's size ----------------------------------------------------------------------------------------


def test_what_is_equal_to_the_bit_holds() -> None:
    draw = random.Random(40)
    same = trial(batches(draw, 100), validation=1.5)
    found = parity_of([(same, same)] * 3, effects=("exact",))
    assert found.answer is HOLDS
    assert check_of(found) == (0, 0, 0, 0)
    assert [check.what for check in found.checks] == ["training loss", "validation loss"]
    for constant in (0.0, 1.0):
        assert parity_of([(trial([constant] * 60),) * 2], ("exact",)).answer is HOLDS
    assert parity_of([(trial([0.0] * 60), trial([1.0] * 60))]).answer is DOES_NOT


def test_steps_that_are_not_the_same_are_not_compared() -> None:
    """Of a training that ends lower, but has begun elsewhere, nobody can say that it is the same."""
    draw = random.Random(46)
    a, b = pair(draw, -0.2, 0.005)
    found = parity_of([(a, b)], ("rounding",))
    assert found.answer is NOT_KNOWN
    assert "their steps could not be matched" in found.note
    assert parity_of([(a, b)], ("sampling",)).answer is HOLDS


def test_a_difference_in_validation_alone_is_found_by_three_pairs() -> None:
    draw = random.Random(41)
    pairs = []
    for seed in range(3):
        losses = batches(draw, 100)
        base = draw.gauss(1.5, 0.1)
        pairs.append((trial(losses, seed, base), trial(losses, seed, base * draw.gauss(1.1, 0.005))))
    found = parity_of(pairs)
    assert found.answer is DOES_NOT
    assert {check.what: check.ok for check in found.checks} == {"training loss": True, "validation loss": False}
    few = parity_of(pairs[:1])
    assert "which so few runs cannot tell from chance" in few.note


def test_nan_under_the_plan_does_not_hold_and_in_the_script_itself_is_not_known() -> None:
    draw = random.Random(42)
    good = pair(draw)
    bad = Trial({}, 4, "nan", 1.0, "3 losses were NaN or infinite")
    found = parity_of([good, (good[0], bad)])
    assert found.answer is DOES_NOT
    assert found.note.startswith("under the plan 3 losses were NaN or infinite, with seed 4")
    assert parity_of([(bad, bad)]).answer is NOT_KNOWN
    assert parity_of([good, (bad, bad)]).answer is NOT_KNOWN


def test_what_cannot_be_compared_is_not_known() -> None:
    draw = random.Random(43)
    assert parity_of([]).answer is NOT_KNOWN
    failed = Trial({}, 0, "crashed", 1.0, "KeyError")
    assert parity_of([(pair(draw)[0], failed)]).answer is NOT_KNOWN
    silent = Trial({}, 0, "ok", 1.0, evidence=evidence([[0.01] * 40], losses=(None,) * 40))
    assert "no loss was seen" in parity_of([(silent, silent)] * 3).note
    assert "too few steps" in parity_of([pair(draw, steps=12)]).note


def test_a_step_without_a_loss_is_left_out_on_both_sides() -> None:
    draw = random.Random(44)
    a, b = pair(draw, scatter=0.001)
    assert b.evidence is not None
    gaps = tuple(None if step % 3 == 0 else loss for step, loss in enumerate(b.evidence.losses))
    holed = dataclasses.replace(b, evidence=dataclasses.replace(b.evidence, losses=gaps))
    assert parity_of([(a, holed)], ("rounding",)).answer is HOLDS


def test_sides_of_unequal_length_are_compared_over_the_steps_that_both_have() -> None:
    draw = random.Random(45)
    a, b = pair(draw, scatter=0.001, steps=300)
    assert b.evidence is not None
    short = trial([loss or 0.0 for loss in b.evidence.losses[:120]])
    assert parity_of([(a, short)]).answer is HOLDS


# -- batches and steps ------------------------------------------------------------------------------------------------


def with_passes(pair: Pair, *counts: tuple[int, ...]) -> Pair:
    """Give both sides passes of so many batches."""
    sides = [
        dataclasses.replace(
            side,
            evidence=dataclasses.replace(
                side.evidence,
                passes=tuple(Pass(0, at, at, at + 1.0, count, True) for at, count in enumerate(batches)),
            ),
        )
        for side, batches in zip(pair, counts, strict=True)
        if side.evidence is not None
    ]
    return sides[0], sides[1]


def test_passes_of_another_number_of_batches_do_not_hold() -> None:
    same = pair(random.Random(50), scatter=0.001)
    found = parity_of([with_passes(same, (100, 100, 100), (100, 98, 98))])
    assert found.answer is DOES_NOT
    assert "98 batches in a pass under the plan and 100 without it" in found.note
    assert [(check.what, check.ok) for check in found.checks][-1] == ("batches a pass", False)
    assert parity_of([with_passes(same, (100, 100, 7), (100, 100, 60))]).answer is HOLDS  # both were cut
    assert parity_of([with_passes(same, (100, 100), (50, 50))], ("trajectory",)).answer is HOLDS


def test_validations_after_other_numbers_of_steps_do_not_hold() -> None:
    a, b = pair(random.Random(51), scatter=0.001)

    def validated(side: Trial, every: int) -> Trial:
        assert side.evidence is not None
        seen = tuple(Validation(every * number, 1.0, 3, 1.0) for number in (1, 2, 3))
        return dataclasses.replace(
            side, evidence=dataclasses.replace(side.evidence, validations=seen, step_of="optimizer")
        )

    assert parity_of([(validated(a, 40), validated(b, 40))]).answer is HOLDS
    assert parity_of([(validated(a, 40), validated(b, 39))]).answer is DOES_NOT


def dropping(losses: list[float], every: int) -> list[float]:
    """The losses of a run to which every n-th batch is never given."""
    return [loss for step, loss in enumerate(losses, 1) if step % every]


def test_a_batch_left_out_is_seen_in_the_losses_that_follow_others() -> None:
    draw = random.Random(52)
    for _ in range(10):
        a, b = (side.evidence for side in pair(draw, scatter=0.01, steps=200))
        assert a is not None
        assert b is not None
        losses = [loss or 0.0 for loss in b.losses]
        pairs = [(trial(list(map(float, a.losses))), trial(dropping(losses, 50)))]  # type: ignore[arg-type]
        found = parity_of(pairs, ("exact", "rounding"))
        assert found.answer is DOES_NOT, found
        assert "follow those of 1 step later" in found.note
        assert "leaves batches out" in found.note
        assert parity_of(pairs).answer is not DOES_NOT  # where nobody says that they must follow
        assert parity_of(pairs, ("sampling",)).answer is not DOES_NOT
        back = parity_of([(pairs[0][1], pairs[0][0])], ("rounding",))
        assert "puts batches in" in back.note


QUIET: dict[str, Callable[[random.Random, int], float]] = {
    "constant": lambda draw, step: 1.0,
    "smooth": lambda draw, step: 1 / (1 + step),
    "rounding alone": lambda draw, step: 1.0 + draw.gauss(0, 1e-8),
    "oscillating": lambda draw, step: 1.0 + 0.1 * (-1) ** step,
    "noise of its own on each side": lambda draw, step: draw.gauss(1, 0.1),
    "batches that return": lambda draw, step: 1.0 + 0.1 * (step % 5 == 0) + 0.05 * (step % 5 == 2),
}


@pytest.mark.parametrize("kind", QUIET)
def test_losses_that_tell_no_batch_from_another_are_not_called_shifted(kind: str) -> None:
    draw = random.Random(53)
    for _ in range(20):
        sides = [{step: QUIET[kind](draw, step) for step in range(200)} for _ in range(2)]
        assert lag_of(*sides) is None


def test_an_honest_plan_is_not_called_shifted_however_far_rounding_drives_it() -> None:
    draw = random.Random(54)
    for scatter in (0.001, 0.02, 0.05, 0.2):
        for _ in range(15):
            a, b = (side.evidence for side in pair(draw, scatter=scatter))
            assert a is not None
            assert b is not None
            assert lag_of(dict(enumerate(map(float, a.losses))), dict(enumerate(map(float, b.losses)))) is None  # type: ignore[arg-type]
