"""Scripts that nobody would write: whatever they do, their steps add up."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hasten.evidence import Phase
from tests.evidence.made_script import Batches, Script

# Binary fractions, so that sums are exact.
moments = st.integers(1, 64).map(lambda n: n / 64)


class AnyScript(RuleBasedStateMachine):
    """Scripts that nobody would write; their steps add up all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.script = Script()
        self.iterators: list[Batches] = []
        self.begun: list[float] = []

    @rule(loader=st.integers(0, 2), seconds=moments)
    def begins_a_pass(self, loader: int, seconds: float) -> None:
        self.begun.append(self.script.time)
        self.iterators.append(self.script.begin(loader, seconds))

    @rule(data=st.data(), seconds=moments, whole=st.booleans())
    def asks_for_a_batch(self, data: st.DataObject, seconds: float, whole: bool) -> None:
        if self.iterators:
            iterator = data.draw(st.sampled_from(self.iterators))
            if whole:
                self.script.next(iterator, seconds)
            else:
                self.script.end(iterator, seconds)

    @rule(data=st.data())
    def drops_an_iterator(self, data: st.DataObject) -> None:
        if self.iterators:
            self.iterators.pop(data.draw(st.integers(0, len(self.iterators) - 1)))

    @rule(phase=st.sampled_from([Phase.FORWARD, Phase.VALIDATION, Phase.CHECKPOINT, Phase.TRANSFER]), seconds=moments)
    def does_something(self, phase: Phase, seconds: float) -> None:
        self.script.part(phase, seconds)

    @rule(seconds=moments)
    def goes_backward(self, seconds: float) -> None:
        self.script.backward(seconds=seconds)

    @rule(optimizer=st.integers(1, 2), seconds=moments, closures=st.integers(0, 2))
    def steps_an_optimizer(self, optimizer: int, seconds: float, closures: int) -> None:
        self.script.step(optimizer, seconds, closures)

    @rule()
    def validates(self) -> None:
        self.script.recorder.validation_loss(1.0)

    @rule(seconds=moments)
    def idles(self, seconds: float) -> None:
        self.script.time += seconds

    @invariant()
    def steps_add_up(self) -> None:
        recorder = self.script.recorder
        assert len(recorder.kept.start) == len(recorder.kept.phases) == len(recorder.kept.losses)
        for start, phases, end in zip(recorder.kept.start, recorder.kept.phases, self.script.ends, strict=True):
            assert min(phases) >= 0
            over = start + recorder.origin + sum(phases)
            # A step whose iterator is gone ended where the next pass began, which shows when that one is asked.
            assert over == pytest.approx(end) or (over < end and any(over == pytest.approx(at) for at in self.begun))

    def teardown(self) -> None:
        recorder = self.script.recorder
        begun = self.script.began.count(True)
        recorder.close()
        self.steps_add_up()
        assert len(recorder.passes) == begun  # every pass that began has ended, once
        for over in recorder.passes:
            assert 0 <= over.start <= over.first <= over.end
        assert sum(count for _, _, count, _ in recorder.validations) <= 10_000


AnyScript.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_any_script = AnyScript.TestCase
