"""The phase clock: whatever a script does, its steps are found and their phases add up."""

from __future__ import annotations

import pytest

from hasten.evidence import PHASES, Phase
from tests.evidence.made_script import Batches, Script

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
