"""Shares of a script's batches: none is lost, none comes twice."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from hasten.parallel.batch_shares import LoaderState, Pass, share_of

BATCHES = st.lists(st.lists(st.integers(), min_size=1, max_size=9), min_size=1, max_size=5)


@given(BATCHES, st.integers(1, 6))
def test_shares_are_all_samples_once(batches: list[list[int]], size: int) -> None:
    shares = [share_of(batches, rank, size) for rank in range(size)]
    assert sorted(chain(*shares)) == sorted(chain(*batches))
    if len(batches) != size:
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_pass_is_shared_once_a_backward_follows() -> None:
    state = LoaderState("train.py:1")
    first = Pass(state, validates=False, likely=False)
    assert not first.shares()
    first.given = 1
    first.backward()
    assert first.shares()
    assert Pass(state, validates=False, likely=False).shares()  # it was trained on before
    assert not Pass(state, validates=True, likely=True).shares()  # the accuracy on training data


def test_a_pass_that_was_taken_for_training_is_given_whole_from_the_second_batch_on() -> None:
    looked_at = Pass(LoaderState(""), validates=False, likely=True)
    assert looked_at.shares()
    looked_at.given = 1
    assert not looked_at.shares()
