"""Listeners are told that steps are over when they want to be, and not before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hasten.taps.step_listeners import NEVER, StepListeners


@given(first=st.integers(1, 20), every=st.integers(1, 9), jumps=st.lists(st.integers(1, 5), max_size=40))
def test_each_is_told_as_soon_as_it_wants_to_be(first: int, every: int, jumps: list[int]) -> None:
    step_listeners, told, wanted = StepListeners(), [], [first]

    def listener(steps: int) -> int:
        told.append(steps)
        wanted.append(steps + every)
        return steps + every

    each: list[int] = []
    step_listeners.add(each.append)
    step_listeners.add(listener, first)
    steps, seen = 0, []
    for jump in jumps:
        steps += jump
        seen.append(steps)
        due = steps >= wanted[-1]
        step_listeners(steps)
        assert (told[-1:] == [steps]) == due
    assert each == seen


def test_one_that_is_hurried_is_told_at_the_next_step_even_if_it_never_wanted_to_be_again() -> None:
    step_listeners, told = StepListeners(), []

    def listener(steps: int) -> int:
        told.append(steps)
        return NEVER

    step_listeners.add(listener)
    for steps in range(1, 10):
        if steps == 5:
            step_listeners.call_soon(listener)
        step_listeners(steps)
    assert told == [1, 5]


def test_one_that_comes_while_others_are_told_is_told_at_the_next_step() -> None:
    step_listeners, told = StepListeners(), []

    def first(steps: int) -> int:
        step_listeners.add(told.append)
        return NEVER

    step_listeners.add(first)
    step_listeners(1)
    step_listeners(2)
    step_listeners(3)
    assert told == [2, 3]


def test_where_steps_are_counted_anew_all_are_told_again() -> None:
    step_listeners, told = StepListeners(), []

    def listener(steps: int) -> int:
        told.append(steps)
        return 1000

    step_listeners.add(listener)
    step_listeners(1)
    step_listeners(900)
    step_listeners.restart()
    step_listeners(1)
    assert told == [1, 1]
