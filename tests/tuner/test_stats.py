"""The statistics behind a claim, checked by simulation and by invariants."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.evidence.interval import Estimate, mean_of
from hasten.tuner.stats import mean_of_course, mean_of_pairs, ratio_of, steps_of
from hasten.tuner.timing import Timing

seconds = st.floats(1e-6, 1e3)


def timing(blocks: list[float], batches: int | None = None, rest: float = 0.0) -> Timing:
    return Timing(tuple(blocks), batches, rest, 1.0, {})


def simulated(draw: random.Random, step: float, process: float = 0.02, block: float = 0.01) -> Timing:
    """A trial as machines give it: each process is somewhat slower or faster, and so is each of its blocks."""
    mean = step * math.exp(draw.gauss(0, process))
    return timing([mean * math.exp(draw.gauss(0, block)) for _ in range(12)])


@given(st.lists(seconds, min_size=1, max_size=12), st.floats(0.1, 10), st.integers(1, 4))
@settings(max_examples=8, deadline=None)
def test_a_constant_factor_is_found_exactly(blocks: list[float], factor: float, pairs: int) -> None:
    """Whatever the times: other blocks of the same kind cannot make the centre anything but the factor."""
    base = timing([statistics.median(blocks)] * 5)
    other = timing([base.step / factor] * 5)
    ratio = ratio_of([(base, other)] * pairs)
    assert ratio.ratio == pytest.approx(factor)
    assert ratio.low == pytest.approx(factor)
    assert ratio.high == pytest.approx(factor)


@given(
    st.lists(
        st.tuples(st.lists(seconds, min_size=1, max_size=6), st.lists(seconds, min_size=1, max_size=6)),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=8, deadline=None)
def test_the_interval_holds_the_ratio_and_turns_with_the_sides(sides: list[tuple[list[float], list[float]]]) -> None:
    pairs = [(timing(a), timing(b)) for a, b in sides]
    there = ratio_of(pairs)
    back = ratio_of([(b, a) for a, b in pairs])
    assert there.low <= there.ratio <= there.high
    assert there.ratio * back.ratio == pytest.approx(1.0)
    assert ratio_of(pairs) == there  # the same numbers give the same claim


def test_what_is_compared_can_be_chosen() -> None:
    """Epochs hold what steps do not."""
    base, other = timing([0.2] * 4, 100, 10.0), timing([0.1] * 4, 100, 10.0)
    assert ratio_of([(base, other)], lambda _, step: step).ratio == pytest.approx(2.0)
    assert ratio_of([(base, other)], lambda one, step: one.epoch_of(step)).ratio == pytest.approx(1.5)
    assert ratio_of([(base, other)]).ratio == pytest.approx(1.5)


def test_intervals_of_five_pairs_hold_the_truth_about_as_often_as_they_say() -> None:
    """Bootstrap over five pairs is known to be somewhat narrow: at least 22 of 30 nominal 95 % intervals."""
    draw = random.Random(11)
    truth, held = 1.1, 0
    for _ in range(30):
        pairs = [(simulated(draw, truth), simulated(draw, 1.0)) for _ in range(5)]
        ratio = ratio_of(pairs)
        held += ratio.low <= truth <= ratio.high
    assert 22 <= held <= 30


def test_two_alike_are_seldom_called_different() -> None:
    draw = random.Random(12)
    wins = sum(ratio_of([(simulated(draw, 1.0), simulated(draw, 1.0)) for _ in range(5)]).low > 1.0 for _ in range(30))
    assert wins <= 5


@pytest.mark.parametrize(("pairs", "most"), [(1, 0), (2, 2), (3, 2)])
def test_processes_alike_are_seldom_called_different_however_few_there_are(pairs: int, most: int) -> None:
    """Of 30, in which the blocks of single pairs alone have 11."""
    draw = random.Random(13)
    claims = [steps_of([(simulated(draw, 1.0), simulated(draw, 1.0)) for _ in range(pairs)]) for _ in range(30)]
    assert sum(claim.low > 1.0 for claim in claims) <= most
    assert all(claim.low <= claim.ratio <= claim.high for claim in claims)


def test_pairs_of_processes_that_agree_show_what_is_faster() -> None:
    draw = random.Random(14)
    claim = steps_of([(simulated(draw, 1.5), simulated(draw, 1.0)) for _ in range(3)])
    assert 1.0 < claim.low <= 1.5 <= claim.high


def course(draw: random.Random, steps: int, phi: float) -> list[float]:
    """Values about 0, each of which keeps `phi` of the one before it."""
    value, values = draw.gauss(0, 1) / math.sqrt(1 - phi**2), []
    for _ in range(steps):
        value = phi * value + draw.gauss(0, 1)
        values.append(value)
    return values


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.8])
def test_the_interval_of_a_course_holds_its_mean_also_where_values_depend_on_each_other(phi: float) -> None:
    """An interval that took the values for independent would hold it in 48 of 100 where phi is 0.8."""
    draw = random.Random(21)
    estimates = [mean_of_course(course(draw, 100, phi)) for _ in range(200)]
    held = [estimate is not None and estimate.low <= 0.0 <= estimate.high for estimate in estimates]
    assert statistics.fmean(held) >= 0.91  # 0.95 by design, 0.93 for the most dependent; standard error 0.018


def test_the_interval_of_a_course_is_not_much_wider_than_need_be() -> None:
    draw = random.Random(22)
    estimates = [mean_of_course(course(draw, 100, 0.0)) for _ in range(100)]
    halves = [estimate.half for estimate in estimates if estimate is not None]
    assert statistics.median(halves) < 1.6 * 1.96 / math.sqrt(100)


def test_pairs_that_differ_among_themselves_widen_the_interval() -> None:
    """What one pair keeps through the whole of its course can only be seen by other pairs."""
    draw = random.Random(23)
    held = []
    for _ in range(200):
        estimates = [mean_of_course(course(draw, 60, 0.0)) for _ in range(3)]
        levels = [draw.gauss(0, 2) for _ in range(3)]
        pairs = [Estimate(e.mean + level, e.half) for e, level in zip(estimates, levels, strict=True) if e]
        pooled = mean_of_pairs(pairs)
        held.append(pooled.low <= 0.0 <= pooled.high)
    assert statistics.fmean(held) >= 0.91


def test_two_pairs_both_lie_in_their_interval() -> None:
    pooled = mean_of_pairs([Estimate(1.0, 0.1), Estimate(-0.5, 0.1)])
    assert (pooled.mean, pooled.low, pooled.high) == pytest.approx((0.25, -0.5, 1.0))


def test_more_pairs_that_agree_see_more() -> None:
    one = Estimate(0.2, 1.0)
    assert mean_of_pairs([one]) == one
    assert mean_of_pairs([one, one]).half == pytest.approx(1 / math.sqrt(2))
    assert mean_of_pairs([one] * 4).half == pytest.approx(1 / 2)


@given(st.lists(st.floats(-100, 100), min_size=10, max_size=60), st.floats(0.1, 10), st.floats(-50, 50))
def test_an_interval_moves_and_grows_with_its_values(values: list[float], scale: float, shift: float) -> None:
    estimate = mean_of_course(values)
    other = mean_of_course([scale * value + shift for value in values])
    assert estimate is not None
    assert other is not None
    assert other.half == pytest.approx(scale * estimate.half, rel=1e-6, abs=1e-9)
    assert other.mean == pytest.approx(scale * estimate.mean + shift, rel=1e-6, abs=1e-9)
    assert estimate.low <= estimate.mean <= estimate.high


def test_too_few_values_give_no_interval() -> None:
    assert mean_of([1.0]) is None
    assert mean_of_course([1.0] * 9) is None
    assert mean_of([1.0, 1.0]) == Estimate(1.0, 0.0)
    three = mean_of([1.0, 2.0, 3.0])
    assert three is not None
    assert three.half == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
