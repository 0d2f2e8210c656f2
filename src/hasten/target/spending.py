"""The budget of a search: what is spent, what is left, and what is said of its runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hasten.target.baseline import Plain
from hasten.target.full_run import FullRun, FullRuns

_SLACK, _START = 1.1, 1.0  # times, and seconds for a start, beyond what the other run takes

Say = Callable[[str], None]


@dataclass(frozen=True)
class TargetOptions:
    """Options of a search.

    Attributes:
        vary: `NAME=VALUE,VALUE` each; empty: the script's rate and batch arguments, if it has any.
        runs: Cost of all at the most, in whole runs of the script as it is.
        seeds: Fresh seeds on which the winner is confirmed.
        budget: Seconds for all at the most; None: as `runs` has it.
    """

    vary: Sequence[str] = ()
    runs: float = 10.0
    seeds: int = 3
    budget: float | None = None


@dataclass
class Account:
    """The runs of a search, and what they may cost.

    Attributes:
        runs: Runs the training, and keeps what it ran.
        options: What a person asks.
        say: Receives progress, a line each.
        plain: The script as it is.
        untried: What there was no time for, a sentence each.
        notes: What a person should know besides, a sentence each.
    """

    runs: FullRuns
    options: TargetOptions
    say: Say
    plain: Plain
    untried: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def spent(self) -> float:
        """Seconds that all runs took so far."""
        return sum(run.seconds for run in self.runs.done)

    @property
    def out_of_time(self) -> bool:
        """Whether the budget is used up."""
        return self.runs.deadline is not None and time.monotonic() >= self.runs.deadline

    def affords(self, seconds: float, aside: float = 0.0) -> bool:
        """Return whether a run of so many seconds stays within what all may cost, with some put aside."""
        left = self.options.runs * self.plain.run.seconds - self.spent
        if self.runs.deadline is not None:
            left = min(left, self.runs.deadline - time.monotonic())
        return seconds + aside <= left

    def tell(self, run: FullRun) -> None:
        """Say how a run ended."""
        goal = self.runs.goal
        best = goal.best(reading.value for reading in run.readings)
        seed = f", seed {run.seed}" if run.seed else ""
        what = f"{run.candidate}{seed}"
        if run.to_goal is not None:
            self.say(f"{what}: {goal} after {run.to_goal:.1f} s of {run.seconds:.1f} s")
        else:
            reason = f" ({run.reason})" if run.reason else ""
            at = f", {goal.name} {best:g}" if best is not None else ""
            self.say(f"{what}: {run.outcome}{reason} in {run.seconds:.1f} s{at}")


def useless_after(seconds: float) -> float:
    """Return the seconds after which a run is of no use, where another took so many."""
    return _SLACK * seconds + _START
