"""Listeners are told that steps are over when they want to be, and not before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hasten.taps.steps_over import NEVER, StepsOver


@given(first=st.integers(1, 20), every=st.integers(1, 9), jumps=st.lists(st.integers(1, 5), max_size=40))
def test_each_is_told_as_soon_as_it_wants_to_be(first: int, every: int, jumps: list[int]) -> None:
    steps_over, told, wanted = StepsOver(), [], [first]

    def listener(steps: int) -> int:
        told.append(steps)
        wanted.append(steps + every)
        return steps + every

    each: list[int] = []
    steps_over.tell(each.append)
    steps_over.tell(listener, first)
    steps, seen = 0, []
    for jump in jumps:
        steps += jump
        seen.append(steps)
        due = steps >= wanted[-1]
        steps_over(steps)
        assert (told[-1:] == [steps]) == due
    assert each == seen


def test_one_that_is_hurried_is_told_at_the_next_step_even_if_it_never_wanted_to_be_again() -> None:
    steps_over, told = StepsOver(), []

    def listener(steps: int) -> int:
        told.append(steps)
        return NEVER

    steps_over.tell(listener)
    for steps in range(1, 10):
        if steps == 5:
            steps_over.hurry(listener)
        steps_over(steps)
    assert told == [1, 5]


def test_one_that_comes_while_others_are_told_is_told_at_the_next_step() -> None:
    steps_over, told = StepsOver(), []

    def first(steps: int) -> int:
        steps_over.tell(told.append)
        return NEVER

    steps_over.tell(first)
    steps_over(1)
    steps_over(2)
    steps_over(3)
    assert told == [2, 3]


def test_where_steps_are_counted_anew_all_are_told_again() -> None:
    steps_over, told = StepsOver(), []

    def listener(steps: int) -> int:
        told.append(steps)
        return 1000

    steps_over.tell(listener)
    steps_over(1)
    steps_over(900)
    steps_over.restart()
    steps_over(1)
    assert told == [1, 1]
