"""The phase clock: whatever a script does, its steps are found and their phases add up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hasten.evidence import PHASES, Phase
from hasten.evidence.kept import KeptSteps
from hasten.evidence.open_pass import OpenPass
from hasten.evidence.recorder import Recorder

# Binary fractions, so that sums are exact.
moments = st.integers(1, 64).map(lambda n: n / 64)


class Batches:
    """An iterator of a loader, as far as the recorder cares."""


class Script:
    """Drives a recorder as a script would, on a clock of its own."""

    def __init__(self) -> None:
        self.time = 100.0
        self.ends: list[float] = []
        self.began: list[bool] = []
        self.recorder = Recorder(now=lambda: self.time, on_step=self._step, on_pass=self._pass)

    def _step(self, steps: int) -> None:
        self.ends.append(self.time)
        assert steps == len(self.ends)

    def _pass(self, opened: OpenPass, began: bool) -> None:
        self.began.append(began)

    def begin(self, loader: int = 0, seconds: float = 0.25) -> Batches:
        iterator, start = Batches(), self.time
        self.time += seconds
        self.recorder.pass_begins(loader, iterator, start, self.time)
        return iterator

    def next(self, iterator: Batches, seconds: float = 1.0) -> None:
        start = self.time
        self.recorder.asks(iterator, start)
        self.time += seconds
        self.recorder.got(iterator, start, self.time)

    def end(self, iterator: Batches, seconds: float = 0.0) -> None:
        self.recorder.asks(iterator, self.time)
        self.time += seconds
        self.recorder.exhausted(iterator, self.time)

    def batches(self, count: int, loader: int = 0, data: float = 1.0) -> Iterator[int]:
        iterator = self.begin(loader)
        for number in range(count):
            self.next(iterator, data)
            yield number
        self.end(iterator)

    def part(self, phase: Phase, seconds: float = 1.0) -> None:
        self.time += seconds
        self.recorder.add(phase, seconds)

    def backward(self, loss: Any = 0.5, seconds: float = 4.0) -> None:
        self.time += seconds
        self.recorder.backward(seconds, [loss])

    def step(self, optimizer: int = 1, seconds: float = 2.0, closures: int = 0) -> None:
        start, before = self.time, self.recorder.optimizer_begins()
        for _ in range(closures):
            self.part(Phase.FORWARD, 3.0)
            self.backward()
        self.time += seconds
        self.recorder.optimizer_step(optimizer, start, self.time, before)

    def train(self, loss: Any = 0.5) -> None:
        """One plain batch: 10 seconds behind the data, one of which is nobody's."""
        self.part(Phase.FORWARD, 3.0)
        self.backward(loss)
        self.step()
        self.time += 1.0

    def steps(self) -> list[dict[str, float]]:
        """What was recorded, phases that took no time left out."""
        return [
            {name: seconds for name, seconds in zip(PHASES, phases, strict=True) if seconds}
            for phases in self.recorder.kept.phases
        ]


PLAIN = {"data": 1.0, "forward": 3.0, "backward": 4.0, "optimizer": 2.0, "other": 1.0}
FIRST = {**PLAIN, "data": 1.25}  # with the start of the pass


@pytest.fixture
def script() -> Script:
    return Script()


def test_a_step_is_a_batch_and_its_phases_add_up(script: Script) -> None:
    for number in script.batches(3):
        script.train(loss=float(number))
    assert script.steps() == [FIRST, PLAIN, PLAIN]
    assert script.recorder.kept.start == [0.0, 11.25, 22.25]
    assert script.recorder.kept.losses == [[0.0], [1.0], [2.0]]
    assert script.recorder.step_of == "batch"
    assert script.recorder.optimizer_steps == {1: 3}


def test_each_epoch_is_a_pass(script: Script) -> None:
    for _ in range(2):
        for _ in script.batches(2, loader=7):
            script.train()
    script.recorder.close()
    assert script.steps() == [FIRST, PLAIN] * 2
    first, second = script.recorder.passes
    assert (first.loader, first.batches, first.trained) == (7, 2, True)
    assert (first.start, first.first, first.end) == (0.0, 1.25, 22.25)
    assert (second.start, second.end) == (22.25, 44.5)
    assert script.began == [True, False] * 2


def test_a_validation_pass_between_epochs_is_not_a_step(script: Script) -> None:
    for _ in script.batches(1):
        script.train()
    for loss in script.batches(3, loader=1):
        script.part(Phase.VALIDATION)
        script.recorder.validation_loss(loss)
    for _ in script.batches(1):
        script.train()
    script.recorder.close()
    assert script.steps() == [FIRST, FIRST]
    assert [(one.loader, one.trained, one.batches) for one in script.recorder.passes] == [
        (0, True, 1),
        (1, False, 3),
        (0, True, 1),
    ]
    assert [(step, total, count) for step, total, count, _ in script.recorder.validations] == [(1, 3, 3)]


@pytest.mark.parametrize("whole", [True, False], ids=["to its end", "left early"])
def test_a_validation_inside_a_step_is_that_steps_validation(script: Script, whole: bool) -> None:
    for number in script.batches(3):
        script.train()
        if number == 1:
            validation = script.begin(loader=1)
            for _ in range(2):
                script.next(validation)
                script.part(Phase.VALIDATION, 2.0)
            if whole:
                script.end(validation)
    assert script.steps() == [FIRST, {**PLAIN, "validation": 0.25 + 2 * 3.0}, PLAIN]
    script.recorder.close()
    assert [(one.loader, one.trained) for one in script.recorder.passes] == [(1, False), (0, True)]


def test_a_validation_before_training_is_of_step_0(script: Script) -> None:
    for _ in script.batches(2, loader=1):
        script.recorder.validation_loss(3.0)
    for _ in script.batches(1):
        script.train()
    assert [(step, total, count) for step, total, count, _ in script.recorder.validations] == [(0, 6.0, 2)]


def test_two_loaders_zipped_are_one_sequence_of_steps(script: Script) -> None:
    images, labels = script.begin(0), script.begin(1)
    for _ in range(3):
        script.next(images)
        script.next(labels, 2.0)
        script.train()
    script.end(images)
    script.recorder.close()
    # A step runs from one question to the second loader, which is current at the backward, to the next; the last
    # is cut short, since it is never asked again. Waiting for the first loader is waiting for data too.
    whole = {"data": 2.0 + 1.0, "forward": 3.0, "backward": 4.0, "optimizer": 2.0, "other": 1.0}
    assert script.steps() == [{**whole, "data": 3.25, "other": 2.0}, whole]
    assert {one.loader for one in script.recorder.passes if one.trained} == {1}


def test_a_script_without_a_loader_steps_by_its_optimizer(script: Script) -> None:
    for number in range(4):
        script.part(Phase.FORWARD, 3.0)
        script.backward(float(number))
        script.step()
        script.time += 1.0
    script.recorder.close()
    whole = {"forward": 3.0, "backward": 4.0, "optimizer": 2.0, "other": 1.0}
    assert script.recorder.step_of == "optimizer"
    assert script.steps() == [whole] * 3  # what came before the first step is not one
    assert script.recorder.kept.losses == [[1.0], [2.0], [3.0]]


def test_several_optimizers_without_a_loader_step_by_the_first(script: Script) -> None:
    for _ in range(3):
        for optimizer in (11, 22):
            script.backward()
            script.step(optimizer)
    assert script.steps() == [{"backward": 8.0, "optimizer": 4.0}] * 2
    assert script.recorder.optimizer_steps == {11: 3, 22: 3}


def test_several_optimizers_in_one_batch_are_one_step(script: Script) -> None:
    for _ in script.batches(2):
        for optimizer in (11, 22):
            script.backward(float(optimizer))
            script.step(optimizer)
    assert [step["optimizer"] for step in script.steps()] == [4.0, 4.0]
    assert script.recorder.kept.losses == [[11.0, 22.0]] * 2


def test_accumulated_batches_are_steps_some_without_an_optimizer(script: Script) -> None:
    for number in script.batches(4):
        script.backward()
        if number % 2:
            script.step()
    assert ["optimizer" in step for step in script.steps()] == [False, True, False, True]


def test_a_script_without_a_loader_and_an_optimizer_steps_by_its_backward(script: Script) -> None:
    for number in range(4):
        script.part(Phase.FORWARD, 3.0)
        script.backward(float(number))
        script.recorder.stepped_by_hand()
        script.time += 2.0
    script.recorder.close()
    assert script.steps() == [{"forward": 3.0, "backward": 4.0, "other": 2.0}] * 3
    assert script.recorder.kept.losses == [[1.0], [2.0], [3.0]]


def test_a_backward_by_hand_within_a_batch_ends_no_step(script: Script) -> None:
    for _ in script.batches(2):
        for _ in range(2):
            script.backward()
            script.recorder.stepped_by_hand()
    assert script.steps() == [{"data": 1.25, "backward": 8.0}, {"data": 1.0, "backward": 8.0}]


def test_the_first_step_is_told_where_none_was_over(script: Script) -> None:
    def so_far() -> dict[str, float]:
        script.recorder.close()
        return {name: part for name, part in zip(PHASES, script.recorder.unfinished, strict=False) if part}

    training = script.begin()
    script.next(training)
    script.train()
    validation = script.begin(1)
    script.next(validation)
    script.part(Phase.VALIDATION, 50.0)
    assert so_far() == {**FIRST, "validation": 51.25}
    script = Script()
    script.step(closures=2)
    assert so_far() == {"forward": 6.0, "backward": 8.0, "optimizer": 2.0}
    script = Script()
    script.part(Phase.FORWARD)
    assert so_far() == {}
    script = Script()
    training = script.begin()
    script.next(training)
    script.train()
    assert so_far() == FIRST


@pytest.mark.parametrize("loader", [True, False])
def test_a_closures_forward_and_backward_are_not_the_optimizers_time(script: Script, loader: bool) -> None:
    if loader:
        for _ in script.batches(3):
            script.step(closures=2)
    else:
        for _ in range(4):
            script.step(closures=2)
    assert len(script.steps()) == 3
    for step in script.steps():
        assert (step["forward"], step["backward"], step["optimizer"]) == (6.0, 8.0, 2.0)


@pytest.mark.parametrize("kept", [True, False], ids=["iterator kept", "iterator dropped"])
def test_training_on_one_batch_steps_by_its_optimizer(script: Script, kept: bool) -> None:
    iterator = script.begin()
    script.next(iterator)
    if not kept:
        del iterator
    for _ in range(70):
        script.train()
    assert script.recorder.step_of == "optimizer"
    assert len(script.steps()) >= (17 if kept else 67)
    assert {tuple(step.items()) for step in script.steps()} == {
        (("forward", 3.0), ("backward", 4.0), ("optimizer", 2.0), ("other", 1.0))
    }


def test_next_of_an_iterator_by_hand_and_begun_anew_is_steps(script: Script) -> None:
    """`try: batch = next(it) except StopIteration: it = iter(loader); batch = next(it)`."""
    iterator = script.begin()
    for number in range(4):
        if number == 2:
            script.end(iterator)
            iterator = script.begin()
        script.next(iterator)
        script.train()
    script.end(iterator)
    assert script.steps() == [FIRST, PLAIN] * 2


@pytest.mark.parametrize("kept", [True, False], ids=["iterator kept", "iterator dropped"])
def test_a_second_batch_drawn_by_next_of_iter_in_every_step(script: Script, kept: bool) -> None:
    """`for x in loader: y = next(iter(other))`: the steps are the outer loader's."""
    for _ in script.batches(4):
        other = script.begin(1)
        script.next(other)
        if not kept:
            del other
        script.train()
    script.recorder.close()
    assert script.recorder.step_of == "batch"
    assert len(script.steps()) == 4
    both = {**PLAIN, "data": 2.25}
    assert script.steps() == [{**both, "data": 2.5}, both, both, both]
    assert {one.loader for one in script.recorder.passes if one.trained} == {0}


@pytest.mark.parametrize("each", [1, 3])
def test_an_iterator_for_every_few_batches(script: Script, each: int) -> None:
    """`batch = next(iter(loader))` in each step, or an iterator that is made again and takes the old one's name."""
    iterator = None
    for number in range(9):
        if number % each == 0:
            if each == 1:
                iterator = None  # gone as soon as it gave its batch
            iterator = script.begin()
        assert iterator is not None
        script.next(iterator)
        script.train()
    assert len(script.steps()) == 8  # the last one may go on
    assert script.steps()[1:] == [FIRST if number % each == 0 else PLAIN for number in range(1, 8)]
    assert script.recorder.step_of == "batch"


def test_the_last_step_of_a_loop_that_is_left_ends_where_the_next_pass_begins(script: Script) -> None:
    for _ in range(2):
        iterator = script.begin()
        for _ in range(2):
            script.next(iterator)
            script.train()
        del iterator
    for _ in script.batches(1, loader=1):
        script.part(Phase.VALIDATION)
    script.recorder.close()
    assert script.steps() == [FIRST, PLAIN] * 2
    assert [(one.batches, one.trained) for one in script.recorder.passes] == [(2, True), (2, True), (1, False)]


def test_an_optimizer_in_the_place_of_another_goes_on_with_the_steps(script: Script) -> None:
    for optimizer in (1, 2):
        for _ in range(100):
            script.part(Phase.FORWARD)
            script.backward()
            script.step(optimizer)
    assert script.recorder.steps >= 140


def test_a_step_of_an_optimizer_trains_whatever_the_gradients_came_from(script: Script) -> None:
    for _ in script.batches(3):
        script.part(Phase.FORWARD, 3.0)
        script.step()
    assert len(script.steps()) == 3
    assert [one.trained for one in script.recorder.passes] == [True]


def test_a_step_cut_short_by_the_end_is_not_recorded(script: Script) -> None:
    iterator = script.begin()
    script.next(iterator)
    script.train()
    script.next(iterator)
    script.part(Phase.FORWARD, 3.0)
    script.recorder.close()
    assert script.steps() == [FIRST]
    assert [one.batches for one in script.recorder.passes] == [2]


def test_an_iterator_that_is_begun_again_after_it_was_left_early_is_two_passes(script: Script) -> None:
    """So do workers that stay alive: every pass of their loader has the same iterator."""
    iterator = script.begin()
    for _ in range(3):
        script.next(iterator)
        script.train()
    start = script.time
    script.recorder.pass_begins(0, iterator, start, start)
    script.next(iterator)
    script.train()
    script.end(iterator)
    script.recorder.close()
    assert [(one.batches, one.trained) for one in script.recorder.passes] == [(3, True), (1, True)]
    assert script.steps() == [FIRST, PLAIN, PLAIN]  # the third was left in the middle


def test_events_of_unknown_iterators_change_nothing(script: Script) -> None:
    script.next(Batches())
    script.end(Batches())
    script.recorder.close()
    assert (script.steps(), script.recorder.passes) == ([], [])


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
                self.rests.resting.rest += 1  # as the tap does where no batch came
            for recorder in (self.rests, self.listens):
                recorder.exhausted(iterator, self.time)

    def ask(self, iterator: Batches) -> bool:
        """Whether the one that rests was told."""
        self.listens.asks(iterator, self.time)
        resting = self.rests.resting
        self.through = not (resting is not None and resting.rest and resting.iterator() is iterator)
        if self.through:
            self.rests.asks(iterator, self.time)
        else:
            resting.rest -= 1
        return self.through

    def get(self, iterator: Batches, start: float) -> None:
        self.listens.got(iterator, start, self.time)
        if self.through:
            self.rests.got(iterator, start, self.time)

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


@given(most=st.sampled_from([2, 4, 32]), steps=st.integers(0, 500))
def test_of_each_group_of_steps_one_is_kept(most: int, steps: int) -> None:
    kept = KeptSteps(most)
    for number in range(steps):
        kept.add(number, float(number), [float(number)] * len(Phase), [number])
    assert len(kept.numbers) <= most
    assert kept.numbers[:1] == [0][:steps]
    assert [number // kept.every for number in kept.numbers] == list(range(len(kept.numbers)))
    assert steps - kept.every < (kept.numbers[-1] if steps else 0) + kept.every
    assert kept.start == [phases[0] for phases in kept.phases] == [loss for (loss,) in kept.losses] == kept.numbers
    assert all(kept.index_of(number) == index for index, number in enumerate(kept.numbers))
    assert sum(kept.numbers) + kept.aside[Phase.VALIDATION] == sum(range(steps))


def test_what_comes_back_every_so_many_steps_is_seen_as_often_as_it_comes() -> None:
    kept = KeptSteps(1024)
    for number in range(100_000):
        kept.add(number, 0.0, [0.0] * len(Phase), [])
    fourth = sum(1 for number in kept.numbers if number % 4 == 0)
    assert 0.15 < fourth / len(kept.numbers) < 0.35


def test_a_long_run_keeps_every_so_manieth_step_and_no_more() -> None:
    recorder = Recorder()
    recorder.optimizer_step(1, 0.0, 0.0, 0.0)
    for _ in range(100_000):
        recorder.backward(0.0, [1.0])
        recorder.optimizer_step(1, 0.0, 0.0, 0.0)
    assert recorder.steps == 100_000
    assert len(recorder.kept.start) == len(recorder.kept.phases) == len(recorder.kept.losses) < 20_000
    assert recorder.kept.every == 8
