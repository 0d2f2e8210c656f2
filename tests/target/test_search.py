"""The search's own logic, on trainings whose curve is a law: what processes would take minutes to show."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from hasten import HastenError
from hasten.report import target_page
from hasten.target import words
from hasten.target.full_run import Candidate, FullRun, FullRuns, time_to
from hasten.target.goal import Goal, parse_goal
from hasten.target.readings import PRINTED, Reading, Readings
from hasten.target.search import search
from hasten.target.spending import TargetOptions
from hasten.tuner.proof import Answer


class Lawful(FullRuns):
    """Each epoch takes a second for batch 8, less for larger ones; the loss falls by rate x steps, with a best rate.

    `diverges` above that rate, `crashes` at that batch, `unlucky` seeds under which other arguments never get there.
    """

    best, diverges, crashes, optimizes = 0.004, 0.05, 0, True
    unlucky: tuple[int, ...] = ()
    interrupted_after = 0

    def run_unchanged(self) -> tuple[FullRun, Readings]:
        readings = Readings(self.goal)
        run = self._law(Candidate(), 1.0, 0, "first", None, False)
        for one in run.readings:
            readings.add_line(PRINTED, f"epoch 1: val_loss {one.value}", one.seconds)
        self.facts = [{"optimizer": "Adam"}] if self.optimizes else []
        self.finished.append(run)
        return run, readings

    def run(
        self,
        candidate: Candidate,
        share: float,
        seed: int,
        part: str,
        goal: Goal,
        most: float | None,
        stop: bool = False,
    ) -> FullRun:
        if self.interrupted_after and len(self.finished) >= self.interrupted_after:
            raise KeyboardInterrupt
        run = self._law(candidate, share, seed, part, most, stop, goal)
        self.finished.append(run)
        return run

    def _law(
        self,
        candidate: Candidate,
        share: float,
        seed: int,
        part: str,
        most: float | None,
        stop: bool,
        goal: Goal | None = None,
    ) -> FullRun:
        own = dict(zip(self.command[1::2], self.command[2::2], strict=True)) | dict(candidate.arguments)
        batch, rate, epochs = (
            float(own.get(name, value)) for name, value in (("--batch-size", 8), ("--lr", 0.001), ("--epochs", 8))
        )
        if batch == self.crashes:
            return FullRun(candidate, share, seed, part, "crashed", 0.1, None, False, (), "exit code 1")
        pace = 0.1 + 0.9 * 8 / batch  # seconds an epoch
        gain = 0.0 if rate > self.diverges or (seed in self.unlucky and candidate.arguments) else min(rate, self.best)
        readings = []
        for epoch in range(1, int(epochs) + 1):
            now = 1.0 + pace * epoch
            readings.append(Reading(now, 2 + 8 * math.exp(-1000 * gain * epoch * 8 / batch / 4) + 1e-6 * seed))
            met = time_to(self.goal, readings)
            if (stop and met is not None) or (most is not None and now > most and goal and not time_to(goal, readings)):
                break
        whole = len(readings) == int(epochs)
        outcome = "reached" if met is not None else "missed" if whole else "slower"
        return FullRun(candidate, share, seed, part, outcome, now, met, whole, tuple(readings))


def lawful(goal: str = "val_loss<=4", command: str = "t.py --lr 0.001 --batch-size 8 --epochs 8", **law: Any) -> Lawful:
    runs = Lawful([], tuple(command.split()), Path(), parse_goal(goal))
    for name, value in law.items():
        setattr(runs, name, value)
    return runs


def quiet(_: str) -> None:
    """Say nothing."""


def test_the_winner_reaches_the_goal_sooner_ends_there_and_is_confirmed_on_fresh_seeds() -> None:
    found = search(lawful(), TargetOptions(), quiet)
    assert found.winner is not None
    assert found.winner.seconds < 0.6 * found.first.seconds
    assert [pair.seed for pair in found.pairs] == [1, 2, 3]
    assert found.ratio is not None
    assert found.proven is Answer.HOLDS
    assert found.ratio.low > 1
    assert found.winner.candidate.arguments.keys() >= {"--lr", "--epochs"}
    line = words.command_line(found).split()
    for name, value in found.winner.candidate.arguments.items():
        assert line[line.index(name) + 1] == value


def test_the_script_as_it_is_runs_at_every_length() -> None:
    found = search(lawful(), TargetOptions(), quiet)
    shares = {run.share for run in found.runs if run.part == "halving"}
    plain = {run.share for run in found.runs if not set(run.candidate.arguments) - {"--epochs"}}
    assert shares <= plain


@pytest.mark.parametrize("most", [2.0, 4.0, 6.0, 10.0, 20.0])
def test_the_cost_stays_within_what_was_said(most: float) -> None:
    found = search(lawful(), TargetOptions(runs=most), quiet)
    assert found.cost <= most * found.first.seconds * 1.05
    if found.winner is None or len(found.pairs) < 3:
        assert found.untried


def test_without_fresh_seeds_nothing_is_proven() -> None:
    found = search(lawful(), TargetOptions(seeds=1), quiet)
    assert found.proven is Answer.NOT_KNOWN
    assert len(found.pairs) == 1
    assert "one pair has no interval" in words.detail(found)


def test_a_miss_on_a_fresh_seed_counts_as_never_and_another_is_taken_or_nothing() -> None:
    found = search(lawful(unlucky=(2,)), TargetOptions(runs=30), quiet)
    assert found.winner is None
    assert found.pairs == ()
    assert any("missed the target on a fresh seed" in note for note in found.notes)
    assert words.title(found) == "nothing found that reaches the target sooner"
    assert words.command_line(found) == "python t.py --lr 0.001 --batch-size 8 --epochs 8"


def test_a_candidate_that_crashes_is_a_result_and_the_others_go_on() -> None:
    found = search(lawful(crashes=128), TargetOptions(), quiet)
    crashed = [run for run in found.runs if run.outcome == "crashed"]
    assert crashed
    assert all(run.share == min(one.share for one in found.runs) for run in crashed)  # not tried any longer
    assert found.winner is not None
    assert "128" not in found.winner.candidate.arguments.values()


def test_where_nothing_helps_the_script_as_it_is_may_still_be_too_long() -> None:
    """All other rates diverge: only fewer epochs are left."""
    found = search(lawful(diverges=0.0015), TargetOptions(), quiet)
    assert found.winner is not None
    assert set(found.winner.candidate.arguments) == {"--epochs"}
    assert found.winner.seconds < found.first.seconds
    assert words.title(found).startswith("no sooner to val_loss<=4, but the run ends there")


def test_ctrl_c_keeps_what_was_found_and_says_that_it_is_not_confirmed() -> None:
    whole = search(lawful(), TargetOptions(), quiet)
    for after in range(1, len(whole.runs)):
        found = search(lawful(interrupted_after=after), TargetOptions(), quiet)
        assert found.interrupted
        assert len(found.runs) == after
        if found.winner is not None:
            assert found.winner.reached
        assert "\n".join(words.lines(found))
        json.loads(found.to_json())


def test_a_goal_that_is_never_reached_is_refused_with_one_that_is() -> None:
    with pytest.raises(HastenError, match="never reached val_loss<=1") as error:
        search(lawful("val_loss<=1"), TargetOptions(), quiet)
    best = float(error.value.fix.partition("val_loss<=")[2].partition('"')[0])
    found = search(lawful(f"val_loss<={best}"), TargetOptions(), quiet)
    assert found.first.reached


def test_a_quality_that_was_never_reported_is_refused() -> None:
    with pytest.raises(HastenError, match="reported no 'accuracy'; it reported 'val_loss'"):
        search(lawful("accuracy>=1"), TargetOptions(), quiet)


def test_nothing_to_vary_is_refused() -> None:
    with pytest.raises(HastenError, match="no argument for its learning rate") as error:
        search(lawful(command="t.py --width 8", optimizes=False), TargetOptions(), quiet)
    assert "--vary" in error.value.fix


def test_what_a_person_asks_is_tried_and_nothing_else() -> None:
    found = search(lawful(), TargetOptions(vary=["--lr=0.002,0.004"]), quiet)
    assert {run.candidate.arguments.get("--lr") for run in found.runs} == {None, "0.002", "0.004"}
    assert found.winner is not None
    assert found.winner.candidate.arguments["--lr"] == "0.004"


def test_without_an_argument_for_the_length_the_report_says_that_it_trains_on() -> None:
    found = search(lawful(command="t.py --lr 0.001"), TargetOptions(), quiet)
    assert found.winner is not None
    assert {run.share for run in found.runs} == {1.0}
    assert any("trains on" in line for line in words.advice(found))


def test_a_budget_bounds_the_search() -> None:
    runs = lawful()
    found = search(runs, TargetOptions(budget=0.0), quiet)
    assert len(found.runs) == 1
    assert runs.deadline is not None
    assert runs.deadline <= time.monotonic()


def test_figures_page_and_screen_hold_what_was_found(tmp_path: Path) -> None:
    found = search(lawful(), TargetOptions(), quiet)
    found.write(tmp_path / "f.json")
    data = json.loads((tmp_path / "f.json").read_text())
    assert data["schema"] == "hasten-target/1"
    assert data["runs"][data["winner"]]["candidate"]["arguments"] == dict(found.winner.candidate.arguments)  # type: ignore[union-attr]
    assert found.ratio is not None
    assert data["ratio"]["ratio"] == pytest.approx(found.ratio.ratio)
    target_page.write(found, tmp_path / "f.html")
    page, screen = (tmp_path / "f.html").read_text(), "\n".join(words.lines(found))
    for text in (words.title(found), words.command_line(found)):
        assert text.replace("<", "&lt;") in page
        assert text in screen
    assert page.count("<polyline") == len([run for run in found.runs if len(run.readings) > 1]) + 1
