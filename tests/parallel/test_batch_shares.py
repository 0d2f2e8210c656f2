"""Shares of a script's batches: none is lost, none comes twice."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from hasten.parallel.batch_shares import LoaderState, Pass, SharedBatches, share_of

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
    first.received = 1
    first.backward()
    assert first.shares()
    assert Pass(state, validates=False, likely=False).shares()  # it was trained on before
    assert not Pass(state, validates=True, likely=True).shares()  # the accuracy on training data


def test_a_pass_that_was_taken_for_training_is_given_whole_from_the_second_batch_on() -> None:
    looked_at = Pass(LoaderState(""), validates=False, likely=True)
    assert looked_at.shares()
    looked_at.received = 1
    assert not looked_at.shares()


def given_to(rank: int, size: int, batching: Any, per_device: bool, passes: int = 1) -> list[list[list[Any]]]:
    """What one rank gets in each pass; all that is given is trained on."""
    meeting: Any = SimpleNamespace(world=SimpleNamespace(rank=rank, size=size, is_zero=True))
    state = LoaderState("")
    state.trained = True
    shared = SharedBatches(
        batching, state, lambda: meeting, lambda of, _: Pass(of, False, True), size, per_device, 64, True
    )
    return [list(shared) for _ in range(passes)]


def test_a_batch_that_is_too_small_to_share_is_given_whole() -> None:
    batching = BatchSampler(SequentialSampler(range(13)), 8, drop_last=False)
    assert [given_to(rank, 4, batching, per_device=False)[0] for rank in range(4)] == [
        [[rank, rank + 4], [8, 9, 10, 11, 12]] for rank in range(4)
    ]


def test_a_loader_in_order_is_not_grouped_per_device_in_any_pass() -> None:
    batching = BatchSampler(SequentialSampler(range(16)), 4, drop_last=False)
    first, second = given_to(1, 4, batching, per_device=True, passes=2)
    assert first == second == list(batching)
