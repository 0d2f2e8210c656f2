"""Evidence read as times: what is made up comes out again."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hasten.evidence import Phase
from hasten.tuner.timing import timing_of
from tests.tuner.evidence import TRAIN, evidence


@given(st.floats(1e-3, 1.0), st.integers(8, 60), st.integers(2, 5), st.floats(0.0, 5.0), st.floats(0.0, 3.0))
def test_a_steady_training_comes_out_as_it_went_in(
    step: float, steps: int, passes: int, stall: float, boot: float
) -> None:
    """A slow first step of the whole training is paid once; a step is what all the others took."""
    first = [step + stall, *[step] * (steps - 1)]
    seen = evidence([first, *[[step] * steps] * (passes - 1)])
    timing = timing_of(seen, seen.ended_at + boot)
    assert timing is not None
    assert timing.step == pytest.approx(step)
    assert timing.batches == 1000
    assert timing.epoch == pytest.approx(1000 * step, rel=1e-6)
    assert timing.cost == pytest.approx(step, rel=1e-6)
    assert sum(timing.phases.values()) == pytest.approx(step)
    assume(stall > 1.1 * step)
    assert timing.startup == pytest.approx(2.0 + boot + stall, rel=1e-6)


def test_a_shortened_validation_counts_as_a_whole_one() -> None:
    """10 of 100 batches took 0.5 s: a whole validation takes 5 s an epoch."""
    timing = timing_of(evidence([[0.1] * 20] * 3, validation=0.5), 10.0)
    assert timing is not None
    assert timing.epoch_overhead == pytest.approx(5.0, rel=0.02)
    assert timing.epoch == pytest.approx(1000 * 0.1 + 5.0, rel=0.01)


def test_what_fills_a_cache_in_the_first_epoch_is_paid_once() -> None:
    timing = timing_of(evidence([[0.3] * 20, [0.1] * 20, [0.1] * 20]), 8.0)
    assert timing is not None
    assert timing.step == pytest.approx(0.1)
    # 0.2 s more for each of the whole epoch's 1,000 batches, behind the 2 s of set-up
    assert timing.startup == pytest.approx(2.0 + 200.0, rel=0.01)


def test_validation_and_checkpoints_inside_an_epoch_are_not_steps() -> None:
    plain = evidence([[0.1] * 20] * 2)
    phases = [list(step) for step in plain.step_phases]
    phases[25][Phase.VALIDATION] = 3.0
    phases[30][Phase.CHECKPOINT] = 1.0
    timing = timing_of(dataclasses.replace(plain, step_phases=tuple(map(tuple, phases))), 10.0)
    assert timing is not None
    assert timing.step == pytest.approx(0.1)
    assert timing.epoch_overhead == pytest.approx(4.0 * 1000 / 20, rel=0.01)


def test_batches_that_workers_had_ready_are_left_out() -> None:
    """Two workers with two batches each: four fast steps at each pass's start tell nothing of a steady one."""
    loader = dataclasses.replace(TRAIN, num_workers=2, prefetch_factor=2)
    timing = timing_of(evidence([[0.01] * 4 + [0.1] * 20] * 3, loaders=(loader,)), 10.0)
    assert timing is not None
    assert timing.step == pytest.approx(0.1)


def test_a_script_without_a_loader_has_steps_and_no_epoch() -> None:
    steps = [4.0, 0.5, *[0.05] * 40]
    timing = timing_of(evidence([steps], loaders=(), passes=(), step_of="optimizer"), 9.0)
    assert timing is not None
    assert timing.step == pytest.approx(0.05)
    assert timing.batches is None
    assert timing.epoch is None
    assert timing.cost == pytest.approx(0.05)
    assert timing.startup > 4.0


@pytest.mark.parametrize("steps", range(8))
def test_too_few_steps_are_not_a_measurement(steps: int) -> None:
    timing = timing_of(evidence([[0.1] * steps]) if steps else evidence([]), 9.0)
    assert timing is None or len(timing.blocks) >= 3
    assert (timing is None) == (steps < 5)


@given(st.lists(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=30), max_size=4), st.floats(0, 20))
def test_any_evidence_gives_times_that_make_sense(passes: list[list[float]], seconds: float) -> None:
    timing = timing_of(evidence(passes, validation=0.1), seconds)
    if timing is not None:
        assert timing.step > 0
        assert timing.epoch_overhead >= 0
        assert timing.startup >= 0
        flat = [step for one in passes for step in one]
        assert min(flat) * 0.999 <= timing.step <= max(flat) * 1.001
