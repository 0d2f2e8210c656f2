"""Track the budget of a search: the seconds spent, whether another run fits, and the progress lines of its runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hasten.target.baseline import PlainScript
from hasten.target.full_run import FullRun, FullRuns

_SLACK, _START = 1.1, 1.0  # factor, and seconds for the start-up, that a run may take beyond another run's time

Say = Callable[[str], None]


@dataclass(frozen=True)
class TargetOptions:
    """Options of a search.

    Attributes:
        vary: Texts of the form `NAME=VALUE,VALUE`; empty: the script's rate and batch arguments, if it has any.
        runs: Most that all runs may cost, in whole runs of the unchanged script.
        seeds: Number of fresh seeds on which the winner is confirmed.
        budget: Most seconds that all may take; None: only `runs` limits it.
    """

    vary: Sequence[str] = ()
    runs: float = 10.0
    seeds: int = 3
    budget: float | None = None


@dataclass
class RunAccount:
    """The runs of a search, and the budget that limits them.

    Attributes:
        runs: Runs the training and keeps the finished runs.
        options: The user's options.
        say: Receives progress, a line at a time.
        plain: The unchanged script's run.
        untried: What there was no time for, a sentence each.
        notes: Further remarks for the user, a sentence each.
    """

    runs: FullRuns
    options: TargetOptions
    say: Say
    plain: PlainScript
    untried: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def spent(self) -> float:
        """Seconds that all runs have taken so far."""
        return sum(run.seconds for run in self.runs.finished)

    @property
    def out_of_time(self) -> bool:
        """Whether the budget is used up."""
        return self.runs.deadline is not None and time.monotonic() >= self.runs.deadline

    def affords(self, seconds: float, reserve: float = 0.0) -> bool:
        """Return whether a run of `seconds` stays within the budget while `reserve` seconds remain for later runs."""
        remaining = self.options.runs * self.plain.run.seconds - self.spent
        if self.runs.deadline is not None:
            remaining = min(remaining, self.runs.deadline - time.monotonic())
        return seconds + reserve <= remaining

    def report(self, run: FullRun) -> None:
        """Report how a run ended."""
        goal = self.runs.goal
        best = goal.best(reading.value for reading in run.readings)
        seed = f", seed {run.seed}" if run.seed else ""
        name = f"{run.candidate}{seed}"
        if run.to_goal is not None:
            self.say(f"{name}: {goal} after {run.to_goal:.1f} s of {run.seconds:.1f} s")
        else:
            reason = f" ({run.reason})" if run.reason else ""
            best_text = f", {goal.name} {best:g}" if best is not None else ""
            self.say(f"{name}: {run.outcome}{reason} in {run.seconds:.1f} s{best_text}")


def useless_after(seconds: float) -> float:
    """Return the seconds after which a run is too slow to be of use, given another run's time."""
    return _SLACK * seconds + _START
