"""What the proof takes back: not only what makes steps slower, but what a run as short as this does not win back."""

from __future__ import annotations

import pytest

from hasten.online.course import Course
from hasten.online.options import Candidate
from hasten.plan import Setting
from hasten.tuner.length import TrainingLength
from hasten.tuner.search_state import SearchState
from hasten.tuner.timing import Timing
from hasten.tuner.trial import Trial
from hasten.tuner.trouble import trouble_of
from tests.tuner.evidence import with_losses

STEADY = [2.0 - 0.001 * step for step in range(100)]
CANDIDATES = (
    Candidate("sample_cache", "samples"),
    Candidate("matmul_precision", "medium"),
    Candidate("precision", "bf16-mixed"),
    Candidate("loader_workers", {"num_workers": 1}),
)


def pairs(step: float, startup: float, plan: dict[str, Setting]) -> list[tuple[Trial, Trial]]:
    """A script with epochs of 79 steps of 10 ms that starts in 2.4 s, and what it takes under the plan."""
    before, after = Timing((0.01,) * 4, 79, 0.06, 2.4, {}), Timing((step,) * 4, 79, 0.06, startup, {})
    evidence = with_losses(STEADY)
    return [(Trial({}, 0, "ok", 4.0, "", evidence, before), Trial(plan, 0, "ok", 5.0, "", evidence, after))]


def found(*chosen: int) -> SearchState:
    return SearchState(Course(CANDIDATES, live=False), warm=False, chosen=frozenset(chosen))


@pytest.mark.parametrize(
    ("epochs", "chosen", "blamed"),
    [
        (2, (0, 1, 2), ("sample_cache",)),  # steps are 1.25x faster; the run would be 1.7x slower
        (2, (1, 2), ("matmul_precision", "precision")),  # nobody knows which of them costs so much
        (90, (0, 1, 2), ()),
    ],
)
def test_what_a_short_run_does_not_win_back_is_taken_back(
    epochs: int, chosen: tuple[int, ...], blamed: tuple[str, ...]
) -> None:
    one = found(*chosen)
    trouble = trouble_of(one, pairs(0.008, 5.6, one.plan()), TrainingLength(epochs, "--epochs on the command line"))
    assert (trouble.blamed if trouble else ()) == blamed
    if trouble:
        assert f"({epochs} epochs)" in trouble.reason
        assert "is not recovered" in trouble.reason


def test_what_fresh_processes_do_not_confirm_is_taken_back_whole() -> None:
    one = found(0, 2)
    trouble = trouble_of(one, pairs(0.012, 2.4, one.plan()), TrainingLength(90, "assumed"))
    assert trouble is not None
    assert trouble.blamed == ("sample_cache", "precision")


@pytest.mark.parametrize(
    ("step", "rest", "chosen", "blamed"),
    [
        (
            0.008,
            0.26,
            (2, 3),
            ("loader_workers",),
        ),  # a short epoch, of which starting workers takes more than they save
        (0.012, 0.06, (2, 3), ("loader_workers", "precision")),  # steps are slower: nobody knows by what
        (0.008, 0.26, (2,), ("precision",)),
        (0.008, 0.06, (2, 3), ()),
    ],
)
def test_where_only_the_passes_begin_slower_workers_go_and_the_rest_stays(
    step: float, rest: float, chosen: tuple[int, ...], blamed: tuple[str, ...]
) -> None:
    one = found(*chosen)
    before, after = Timing((0.01,) * 4, 79, 0.06, 2.4, {}), Timing((step,) * 4, 79, rest, 2.4, {})
    evidence = with_losses(STEADY)
    fresh = [(Trial({}, 0, "ok", 4.0, "", evidence, before), Trial(one.plan(), 0, "ok", 4.0, "", evidence, after))]
    trouble = trouble_of(one, fresh, TrainingLength(90, "assumed"))
    assert set(trouble.blamed if trouble else ()) == set(blamed)
