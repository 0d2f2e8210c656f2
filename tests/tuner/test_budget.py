"""A budget is a promise: what goes on behind its end is ended, and what that would have shown is not known."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hasten.errors import HastenError
from hasten.online.candidates import Applicable
from hasten.online.course import Course
from hasten.online.options import Candidate, OnlineOptions
from hasten.online.posterior import CandidateEstimate
from hasten.online.record import MeasuredBlock
from hasten.taps.config import TrialOptions
from hasten.tuner import tune as module
from hasten.tuner.budget import TimeSpent, block_seconds
from hasten.tuner.check import CheckOptions, check
from hasten.tuner.online_search import OnlineSearch
from hasten.tuner.outcome import _why_lost
from hasten.tuner.search_state import SearchState
from hasten.tuner.trial import Trial, Trials
from hasten.tuner.tune import TuneOptions, _Tune


class Slow(Trials):
    """Trials of a training that takes so long by a made-up clock; they are ended at the deadline, as real ones are."""

    clock: Any
    seconds = 0.0

    def run(self, plan: Mapping[str, Any], seed: int = 0, *, probe: bool = False, timeout: float = 120.0) -> Trial:
        end = self.clock.now + self.seconds
        cut = end > self.deadline
        self.clock.now = min(end, self.deadline)
        return Trial(dict(plan), seed, "timeout" if cut else "ok", self.seconds)


@pytest.mark.parametrize(("seconds", "pairs"), [(5.0, 3), (12.0, 1), (30.0, 0)])
def test_pairs_end_with_the_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: float, pairs: int) -> None:
    """Each run was expected to take 10 s; the budget of 100 s has 30 left."""
    clock = SimpleNamespace(now=70.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    trials = Slow((sys.executable,), (), tmp_path, TrialOptions(str(tmp_path)), 110.0)
    trials.clock, trials.seconds = clock, seconds
    tune = _Tune(trials, TuneOptions(budget=100.0, seeds=9), lambda _: None, None, 0.0)
    found: Any = SimpleNamespace(chosen={0}, plan=lambda: {"precision": "bf16-mixed"}, would_ask=[], claim=lambda: None)
    tune.state = found
    monkeypatch.setattr(_Tune, "_pair_seconds", lambda self: 20.0)
    baseline: Any = SimpleNamespace(trial=SimpleNamespace(seconds=10.0))
    tune.baseline = baseline
    tune._measure_pairs()
    assert clock.now <= 110.0
    assert len(tune.pairs) == pairs
    assert all(trial.ok for pair in tune.pairs for trial in pair), "one that was ended is not held against the plan"
    assert bool(found.would_ask) == (not pairs)


@pytest.mark.parametrize(("budget", "times"), [(200.0, 1), (100.0, 0)])
def test_a_claim_that_others_disturbed_is_measured_once_more_where_there_is_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, budget: float, times: int
) -> None:
    """Behind the first pair, 90 s after the start: they may be gone by then. Their going is what is made up here."""
    clock = SimpleNamespace(now=70.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    trials = Slow((sys.executable,), (), tmp_path, TrialOptions(str(tmp_path)), 1.1 * budget)
    trials.clock, trials.seconds = clock, 10.0
    said: list[str] = []
    tune = _Tune(trials, TuneOptions(budget=budget, seeds=2), said.append, None, 0.0)
    tune.state = SearchState(Course((Candidate("fused_optimizer", True),)), chosen=frozenset({0}))
    tune.applicable = Applicable(tuple(tune.state.course.candidates), {}, ())
    sides = [MeasuredBlock(float(at), 1.0, 9, (0,) * (at % 2), "plan" if at % 2 else "plain") for at in range(8)]
    tune.state.blocks += [dataclasses.replace(side, taken=0.5, disturbed=True) for side in sides]

    class Quiet(OnlineSearch):
        def claim(self, until: float) -> None:
            assert clock.now < until <= budget
            tune.state.blocks += sides

    monkeypatch.setattr(module, "OnlineSearch", Quiet)
    monkeypatch.setattr(_Tune, "_pair_seconds", lambda self: 20.0)
    baseline: Any = SimpleNamespace(trial=SimpleNamespace(seconds=10.0))
    tune.baseline, tune.startup = baseline, 8.0
    tune._measure_pairs()
    assert sum("others disturbed it" in line for line in said) == times
    assert (tune.state.disturbed() is None) == bool(times)


@pytest.mark.parametrize("taken_back", [True, False])
def test_it_says_why_the_claim_is_measured_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, taken_back: bool
) -> None:
    """A script that ends before its search is over leaves no claim: then nothing was taken back."""
    trials = Trials((sys.executable,), (), tmp_path, TrialOptions(str(tmp_path)), time.monotonic() + 100.0)
    said: list[str] = []
    tune = _Tune(trials, TuneOptions(budget=100.0), said.append, None, time.monotonic())
    tune.applicable = Applicable((Candidate("fused_optimizer", True), Candidate("set_to_none", True)), {}, ())
    tune.state, tune.startup = SearchState(Course(tune.applicable.candidates), chosen=frozenset({0, 1})), 1.0
    if taken_back:
        tune._take_back(["set_to_none"], "it does nothing")
    monkeypatch.setattr(OnlineSearch, "claim", lambda self, until: None)
    tune._claim_where_missing()
    assert said[-1].startswith("measuring fused_optimizer")
    assert ("once more, without what was taken back" in said[-1]) == taken_back


def test_nothing_is_started_for_which_no_time_is_left(tmp_path: Path) -> None:
    """The second of a pair, where the first took all of it; nor a search that would end before the script trains."""
    trials = Trials((sys.executable, "-c", "open('ran', 'w')"), (), tmp_path, TrialOptions(str(tmp_path)), 0.0)
    assert (trials.run({}).outcome, trials.finished, list(tmp_path.iterdir())) == ("timeout", [], [])
    said: list[str] = []
    tune = _Tune(trials, TuneOptions(budget=20.0), said.append, None, time.monotonic() - 15.0)
    tune.applicable = Applicable((Candidate("fused_optimizer", True),), {}, ())
    tune.state, tune.startup = SearchState(Course(tune.applicable.candidates)), 9.0
    tune._search()
    assert said == ["no time is left for a search: 5 s, and the script takes 9 s before it trains"]
    assert tune.state.would_ask == ["what helps at all: 5 s were left for a script that starts in 9 s"]


def test_a_budget_holds_what_the_process_took_before_and_its_report(tmp_path: Path) -> None:
    trials = Trials((sys.executable,), (), tmp_path, TrialOptions(str(tmp_path)), 0.0)
    tune = _Tune(trials, TuneOptions(budget=45.0, started=4.0), lambda _: None, None, -4.0)
    assert tune.deadline == pytest.approx(-4.0 + 45.0 - 6.0)
    told = "import time\ntime.sleep(0.5)\nfrom hasten.child import running_for\nprint(running_for())"
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert 0.5 <= float(done.stdout) <= time.monotonic() - before + 0.02


@pytest.mark.parametrize(
    ("budget", "training", "block"),
    [(20.0, 600.0, 0.5), (180.0, 600.0, 0.6), (3600.0, 600.0, 1.0), (120.0, 1.6, 0.2), (120.0, 0.1, 0.1)],
)
def test_a_block_is_longer_in_a_long_tune_and_shorter_in_a_short_training(
    budget: float, training: float, block: float
) -> None:
    assert block_seconds(budget, training) == pytest.approx(block)


def test_each_second_of_a_tune_goes_to_one_stage() -> None:
    before = time.monotonic()
    spent = TimeSpent(before - 3.0)
    for stage in ("search", "check", "search"):
        spent.begin(stage)
        time.sleep(0.05)
    seconds = spent.seconds()
    assert list(seconds) == ["start", "search", "check"]
    assert seconds["start"] >= 3.0
    assert seconds["search"] >= 0.1
    assert seconds["check"] >= 0.05
    assert 3.15 <= sum(seconds.values()) <= time.monotonic() - before + 3.0


def test_a_check_that_is_ended_says_nothing_of_the_plan(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(60)\n")
    options = CheckOptions(until=time.monotonic() + 0.5)
    with pytest.raises(HastenError, match="time was over"):
        check((sys.executable, str(script)), ("train.py",), {"set_to_none": True}, options, lambda _: None)


@pytest.mark.parametrize(
    ("seconds", "chosen", "more"),
    [(100.0, (), True), (100.0, (0,), False), (12.0, (), False)],
    ids=["doubtful", "chosen", "no time"],
)
def test_a_search_that_chose_nothing_goes_on_with_the_rest_of_the_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: float, chosen: tuple[int, ...], more: bool
) -> None:
    """Where nothing was chosen, no claim, check or pair needs the time that was kept for them."""
    trials = Trials((sys.executable,), (), tmp_path, TrialOptions(str(tmp_path)), time.monotonic() + seconds)
    found = SearchState(Course((Candidate("fused_optimizer", True),)), chosen=frozenset(chosen))
    found.course.settle(frozenset(chosen))
    said: list[str] = []
    options = OnlineOptions(found.course.candidates, "", 0.0, 0.0, block_seconds=0.5)
    search = OnlineSearch(trials, found, options, 10.0, said.append, lambda block: None)
    until: list[tuple[float, float]] = []
    monkeypatch.setattr(
        OnlineSearch, "search", lambda self: until.append((self._options.search_until, self._options.claim_until))
    )
    search.search_more(trials.deadline)
    assert bool(said) == bool(until) == more
    assert (found.course.settled is None) == more, "a settled course would not search on"
    for search_until, claim_until in until:
        assert search_until < claim_until == trials.deadline


@pytest.mark.parametrize(
    ("spread", "why"),
    [(0.02, "steps are slower with it here"), (0.1, "no gain was seen, and a loss is not certain")],
)
def test_a_setting_that_may_help_is_not_called_slower(spread: float, why: str) -> None:
    """A loss is said only where the interval lies below 1."""
    found = SearchState(Course((Candidate("fused_optimizer", True),)))
    assert _why_lost(found, 0, CandidateEstimate(0.05, spread, 2, 2)) == why
