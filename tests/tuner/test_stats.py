"""The statistics behind a claim, checked by simulation and by invariants."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.tuner.stats import prediction_band, ratio_of
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


@pytest.mark.parametrize(("seeds", "others"), [(3, 3), (5, 5), (5, 1), (10, 3)])
def test_the_band_holds_ninety_nine_of_a_hundred(seeds: int, others: int) -> None:
    draw = random.Random(seeds * 100 + others)
    trials, held = 3000, 0
    for _ in range(trials):
        low, high = prediction_band([draw.gauss(2.0, 0.3) for _ in range(seeds)], others)
        held += low <= statistics.fmean(draw.gauss(2.0, 0.3) for _ in range(others)) <= high
    # 0.99 with a standard error of 0.0016; beyond eleven seeds the table is rounded up.
    assert 0.983 <= held / trials <= 0.997


@given(
    st.lists(st.floats(-100, 100), min_size=2, max_size=15), st.integers(1, 10), st.floats(0.1, 10), st.floats(-50, 50)
)
def test_a_band_moves_and_grows_with_its_values(values: list[float], others: int, scale: float, shift: float) -> None:
    low, high = prediction_band(values, others)
    assert low <= statistics.fmean(values) <= high
    wide_low, wide_high = prediction_band([value * scale for value in values], others)
    assert wide_high - wide_low == pytest.approx((high - low) * scale, rel=1e-6, abs=1e-9)
    more_low, more_high = prediction_band(values, others + 1)
    assert more_high - more_low <= high - low + 1e-12
