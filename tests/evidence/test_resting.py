"""A phase clock that rests between steps, beside one that does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.evidence import Phase
from hasten.evidence.recorder import Recorder
from hasten.evidence.step_thinning import KeptSteps
from tests.evidence.made_script import Batches


class Rested:
    """The same script on two clocks: one that may rest, whose taps let calls pass meanwhile, and one that may not."""

    def __init__(self, most: int) -> None:
        self.time = 100.0
        self.rests = Recorder(now=lambda: self.time, on_step=self._step, may_rest=True)
        self.rests.kept = KeptSteps(most)
        self.listens = Recorder(now=lambda: self.time)
        self.told: list[int] = []

    def _step(self, steps: int) -> None:
        assert steps > (self.told[-1] if self.told else 0)
        self.told.append(steps)

    def train(self, steps: int, optimizer: int = 1, inner: int = 1) -> None:
        """Forward, backward and some optimizer steps, each step longer than the one before."""
        self.part(Phase.FORWARD, 1.0 + steps / 64)
        self.time += 2.0
        self.listens.backward(2.0, [steps])
        if self.rests.resting is None:
            self.rests.backward(2.0, [steps])
        for _ in range(inner):
            start = self.time
            self.time += 0.5
            self.listens.optimizer_step(optimizer, start, self.time, -1.0)
            if self.rests.resting is None:
                self.rests.optimizer_step(optimizer, start, self.time, -1.0)
            else:
                self.rests.rested_optimizer_step(optimizer)

    def part(self, phase: Phase, seconds: float) -> None:
        self.time += seconds
        self.listens.add(phase, seconds)
        self.rests.add(phase, seconds)

    def batches(self, loader: int, count: int, whole: bool = True) -> Iterator[int]:
        iterator, start = Batches(), self.time
        for recorder in (self.rests, self.listens):
            recorder.pass_begins(loader, iterator, start, start)
        for number in range(count):
            self.ask(iterator)
            self.time += 0.25
            self.get(iterator, self.time - 0.25)
            yield number
        if whole:
            if not self.ask(iterator):
                self.rests.resting.rest_remaining += 1  # as the tap does where no batch came
            for recorder in (self.rests, self.listens):
                recorder.exhausted(iterator, self.time)

    def ask(self, iterator: Batches) -> bool:
        """Whether the one that rests was told."""
        self.listens.batch_requested(iterator, self.time)
        resting = self.rests.resting
        self.through = not (resting is not None and resting.rest_remaining and resting.iterator() is iterator)
        if self.through:
            self.rests.batch_requested(iterator, self.time)
        else:
            resting.rest_remaining -= 1
        return self.through

    def get(self, iterator: Batches, start: float) -> None:
        self.listens.batch_received(iterator, start, self.time)
        if self.through:
            self.rests.batch_received(iterator, start, self.time)

    def check(self, whole_passes: bool = True) -> None:
        """All that both know is the same; a step that is left in the middle may have saved or validated."""
        for recorder in (self.rests, self.listens):
            recorder.close()
        rests, whole = self.rests.kept, self.listens.kept
        assert self.rests.steps == self.listens.steps
        assert [vars(one) for one in self.rests.passes] == [vars(one) for one in self.listens.passes]
        assert self.rests.optimizer_steps == self.listens.optimizer_steps
        assert [rests.start[at] for at in range(len(rests.numbers))] == [whole.start[n] for n in rests.numbers]
        assert rests.phases == [whole.phases[number] for number in rests.numbers]
        assert rests.losses == [whole.losses[number] for number in rests.numbers]
        for phase in (Phase.VALIDATION, Phase.CHECKPOINT):
            seen = sum(phases[phase] for phases in rests.phases) + rests.aside[phase]
            expected = sum(phases[phase] for phases in whole.phases)
            assert seen == pytest.approx(expected) or (seen > expected and not whole_passes)


@given(
    most=st.sampled_from([2, 8, 64]),
    passes=st.lists(st.tuples(st.integers(0, 25), st.booleans(), st.integers(0, 7), st.integers(0, 7)), max_size=5),
)
@settings(max_examples=100, deadline=None)
def test_a_clock_that_rests_misses_nothing_of_what_it_keeps(
    most: int, passes: list[tuple[int, bool, int, int]]
) -> None:
    """Whatever passes, validation within them and checkpoints a run has."""
    script = Rested(most)
    for count, whole, validate, save in passes:
        for number in script.batches(0, count, whole):
            script.train(number)
            if validate and number % 8 == validate:
                script.rests.wake()  # as a forward in eval mode does
                for _ in script.batches(1, 3):
                    script.part(Phase.VALIDATION, 0.5)
            if save and number % 8 == save:
                script.part(Phase.CHECKPOINT, 4.0)
    script.check(all(whole for _, whole, _, _ in passes))


def test_a_clock_rests_between_the_steps_of_an_optimizer_too() -> None:
    script = Rested(16)
    for number in range(200):
        script.train(number)
        script.time += 0.25
    script.check()
    assert script.rests.step_of == "optimizer"
    assert len(script.told) < 80 < script.rests.steps


def test_a_clock_that_rests_notices_that_a_loader_is_asked_no_more() -> None:
    script = Rested(4)
    for number in script.batches(0, 60, whole=False):
        script.train(number)
    for number in range(2000):  # the last batch again and again
        script.train(number)
    script.rests.close()
    assert script.rests.passes[0].batches == 60
    assert script.rests.optimizer_steps == {1: 2060}
