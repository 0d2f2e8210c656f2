"""The computed order of a data set: each sample once, another order for each seed and epoch, always the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.data.permutation import Permutation, key_of

NUMBERS = st.integers(-(2**70), 2**70)


@given(st.integers(0, 70_000) | st.sampled_from([65_535, 65_536, 65_537, 131_072, 131_073, 262_145]), NUMBERS, NUMBERS)
@settings(max_examples=60, deadline=None)
def test_each_number_comes_once(length, seed, epoch):
    numbers = Permutation(length, seed, epoch)(np.arange(length))
    assert np.array_equal(np.sort(numbers), np.arange(length))


@given(st.integers(65_537, 2**40), NUMBERS, st.data())
@settings(max_examples=40, deadline=None)
def test_a_position_of_a_long_order_is_found_without_those_before_it(length, seed, data):
    positions = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=50, unique=True))
    order = Permutation(length, seed)
    together = order(positions)
    assert together.min() >= 0
    assert together.max() < length
    assert len(set(together.tolist())) == len(positions)
    assert [int(order([p])[0]) for p in positions] == together.tolist()


def test_an_order_never_changes():
    """A checkpoint of today has to go on with every later version: these figures must not be edited."""
    assert Permutation(10, 0, 0)(np.arange(10)).tolist() == [0, 3, 2, 8, 5, 7, 4, 9, 6, 1]
    assert Permutation(1_000_000, 7, 3)(np.arange(5)).tolist() == [522496, 258816, 746241, 586242, 47539]
    assert key_of(1, 2, 3) == 15378950933529109311


@pytest.mark.parametrize("length", [100, 100_000])
def test_seeds_and_epochs_give_unlike_orders(length):
    orders = [Permutation(length, seed, epoch)(np.arange(length)) for seed in range(6) for epoch in range(6)]
    for number, order in enumerate(orders):
        for other in [np.arange(length), *orders[:number]]:
            assert (order == other).sum() < 12  # of two random orders 1 place is alike on average, 12 in 1e-9


@pytest.mark.parametrize("length", [16, 1000, 70_000, 131_072])
def test_places_are_shuffled_evenly(length):
    """Each tenth of the positions takes from each tenth of the samples alike (chi-square over many orders)."""
    tenths = 8
    counts = np.zeros((tenths, tenths))
    positions = np.arange(length)
    orders = 400 if length <= 1000 else 12
    for seed in range(orders):
        taken = Permutation(length, seed, 0)(positions)
        np.add.at(counts, (positions * tenths // length, taken * tenths // length), 1)
    expected = orders * length / tenths**2
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = (tenths - 1) ** 2
    assert statistic < freedom + 6 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("length", [70_000, 200_000])
def test_neighbours_are_no_neighbours_afterwards(length):
    order = Permutation(length, 5, 1)(np.arange(length))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert (np.abs(np.diff(order)) == 1).sum() < 20


def test_all_orders_of_a_few_samples_occur():
    seen = {tuple(Permutation(4, seed, 0)(np.arange(4)).tolist()) for seed in range(600)}
    assert len(seen) == 24


def test_a_position_outside_is_refused():
    for length in (10, 100_000):
        with pytest.raises(IndexError, match=f"below {length}"):
            Permutation(length, 0)([length])
        with pytest.raises(IndexError, match="at least 0"):
            Permutation(length, 0)([-1])
