"""Of a long run few steps are kept, spread over all of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hasten.evidence import Phase
from hasten.evidence.recorder import Recorder
from hasten.evidence.step_thinning import KeptSteps


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
