"""One whole run of the training in a process of its own, with other arguments or a plan, listened to from outside.

What the script writes goes to a scratch folder. It trains at full speed: no step is timed, and lines get their time as
they come.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten import files
from hasten.child import Child, how_it_ended, start_logged
from hasten.errors import OUT_OF_MEMORY
from hasten.messages import is_terminal
from hasten.plan import Setting
from hasten.taps.config import DoctorOptions, RunConfig, TrialOptions, environment
from hasten.target.arguments import with_arguments
from hasten.target.goal import Goal
from hasten.target.readings import LOGGED, PRINTED, Kind, Reading, Readings, Tail
from hasten.target.run_observer import VARIABLE
from hasten.techniques import toml_value
from hasten.tuner.trial import last_lines

_LOOK = 0.05  # seconds between two looks at what was printed
_DEAD = ("crashed", "out of memory", "nothing reported", "idle")
_NEVER = 1 << 62  # batches, epochs and steps that bound nothing


@dataclass(frozen=True)
class Candidate:
    """A candidate to try: other values of the script's own arguments, techniques, or both.

    Attributes:
        arguments: Name -> value, as they stand on a command line.
        plan: Technique -> setting.
        why: Where its values come from.
    """

    arguments: Mapping[str, str] = field(default_factory=dict)
    plan: Mapping[str, Setting] = field(default_factory=dict)
    why: str = ""

    def __str__(self) -> str:
        parts = [
            f"{name} {value}" if name.startswith("-") else f"{name}={value}" for name, value in self.arguments.items()
        ]
        return (
            ", ".join(parts + [f"{name} = {toml_value(value)}" for name, value in self.plan.items()])
            or "the script as it is"
        )


@dataclass(frozen=True)
class FullRun:
    """A whole run that is over.

    Attributes:
        candidate: What it was run with.
        share: Of the script's own length, from 0 to 1.
        seed: Shift of the script's seeds.
        part: "first", "halving", "shorter", "longer" or "fresh seeds".
        outcome: "reached", "missed", "slower" (stopped: it took longer than it could to be of use), "crashed", "out of
            memory", "nothing reported", "idle" (its techniques found nothing to act on).
        seconds: How long it ran.
        to_goal: Seconds until it reported that the goal was reached; None: it never did.
        whole: Whether it came to its own end, so that `seconds` is how long the script takes.
        readings: What it reported of the quality.
        reason: Why it failed, in one line.
    """

    candidate: Candidate
    share: float
    seed: int
    part: str
    outcome: str
    seconds: float
    to_goal: float | None
    whole: bool
    readings: tuple[Reading, ...] = ()
    reason: str = ""
    log: str = ""

    @property
    def lived(self) -> bool:
        """Whether it came to report anything: one that crashed has no result."""
        return self.outcome not in _DEAD

    @property
    def reached(self) -> bool:
        """Whether it reached the goal."""
        return self.to_goal is not None


@dataclass
class FullRuns:
    """Runs a training, one run after the other.

    Args:
        arguments: The process's arguments.
        command: The training's own command line.
        scratch: Folder for what the runs write.
        goal: What is to be reached.
        only: A text that a printed line must hold to count.
        deadline: On the monotonic clock: no run goes on beyond it. None: there is none.
    """

    arguments: Sequence[str]
    command: tuple[str, ...]
    scratch: Path
    goal: Goal
    only: str = ""
    deadline: float | None = None
    kind: Kind | None = None
    done: list[FullRun] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)

    def first(self) -> tuple[FullRun, Readings]:
        """Run the script as it is; what it reports, and `facts` of its arguments and optimizer, are kept."""
        run, readings, self.facts = self._run(Candidate(), 1.0, 0, "first", self.goal, None, stop=False)
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
        """Run the training with a candidate.

        Args:
            candidate: What it is run with.
            share: Of the script's own length, for the record.
            seed: Shift of the script's seeds.
            part: Of the search, for the record.
            goal: What it must have reached by `most`; easier than that of all where it is a shortened run.
            most: Seconds after which it is stopped unless it has reached that; None: never.
            stop: End it once it has reached the goal of all: what comes behind it is known.
        """
        return self._run(candidate, share, seed, part, goal, most, stop)[0]

    def _run(
        self, candidate: Candidate, share: float, seed: int, part: str, goal: Goal, most: float | None, stop: bool
    ) -> tuple[FullRun, Readings, list[dict[str, Any]]]:
        folder = self.scratch / f"w{len(self.done)}"
        folder.mkdir()
        readings = Readings(self.goal, self.only)
        tails = {PRINTED: Tail(folder / "log"), LOGGED: Tail(folder / "logged")}
        start = time.monotonic()
        late = False
        with (folder / "log").open("wb") as log:
            child = self._start(candidate, seed, folder, log)
            try:
                while (code := child.wait(_LOOK)) is None:
                    now = time.monotonic() - start
                    self._hear(readings, tails, now)
                    late = most is not None and now > most and self._met(readings, goal) is None
                    late = late or (self.deadline is not None and time.monotonic() > self.deadline)
                    if late or (stop and self._met(readings, self.goal) is not None):
                        break
                seconds = time.monotonic() - start
            finally:
                child.end()
        self._hear(readings, tails, seconds, last=True)
        for tail in tails.values():
            tail.close()
        values = tuple(readings.of_kind(self.kind)) if self.kind is not None else ()
        to_goal = self._met(readings, self.goal)
        log_end = last_lines(folder / "log")
        outcome, reason = _outcome(code, late, to_goal, bool(values) or self.kind is None, log_end)
        facts = _facts(folder)
        shutil.rmtree(folder, ignore_errors=True)
        idle: dict[str, str] = next((fact["idle"] for fact in facts if "idle" in fact), {}) if candidate.plan else {}
        if idle and outcome in ("reached", "missed"):
            outcome, reason = "idle", "; ".join(f"{name}: {why}" for name, why in idle.items())
        if outcome in ("crashed", "out of memory", "idle"):
            to_goal = None  # a run that dies has no result, whatever it reported before; one that changed nothing, too
        run = FullRun(
            candidate, share, seed, part, outcome, seconds, to_goal, code == 0, values, reason,
            log_end if outcome == "crashed" else "",
        )  # fmt: skip
        self.done.append(run)
        return run, readings, facts

    def _start(self, candidate: Candidate, seed: int, folder: Path, log: Any) -> Child:
        trial = TrialOptions(str(folder), _NEVER, _NEVER, _NEVER, seconds=float(_NEVER), seed=seed, cut=False)
        inside = DoctorOptions(steps=0, seconds=0.0, sample=False, observers=("hasten.target.run_observer",))
        config = RunConfig(dict(candidate.plan), "", self.command, trial, quiet=True, doctor=inside)
        own = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", VARIABLE: str(folder)}
        arguments = with_arguments(self.arguments, candidate.arguments)
        stdin = None if is_terminal(sys.stdin) else subprocess.DEVNULL
        return start_logged(arguments, environment(config, {**os.environ, **own}), log, stdin)

    def _hear(self, readings: Readings, tails: Mapping[str, Tail], seconds: float, last: bool = False) -> None:
        for where, tail in tails.items():
            for line in tail.lines(last):
                readings.hear(where, line, seconds)

    def _met(self, readings: Readings, goal: Goal) -> float | None:
        """Return when the goal was reached; None as long as it was not."""
        if self.kind is None:
            return None
        return time_to(goal, readings.of_kind(self.kind))


def _facts(folder: Path) -> list[dict[str, Any]]:
    """Read the facts that a run wrote of itself."""
    tail = Tail(folder / "facts")
    found = [fact for line in tail.lines(last=True) if isinstance(fact := files.parse_json(line), dict)]
    tail.close()
    return found


def time_to(goal: Goal, readings: Sequence[Reading]) -> float | None:
    """Return the seconds at which a reading met the goal first; None where none did."""
    return next((reading.seconds for reading in readings if goal.is_met(reading.value)), None)


def _outcome(code: int | None, late: bool, to_goal: float | None, heard: bool, log: str) -> tuple[str, str]:
    """Return how a run ended, and why in one line."""
    last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
    if code is None:
        return ("slower", "stopped: it took too long") if late else ("reached", "stopped there")
    if code == -signal.SIGKILL or (code and any(word in log for word in OUT_OF_MEMORY)):
        return "out of memory", last or "killed by the kernel"
    if code:
        return "crashed", f"{how_it_ended(code)}: {last}" if last else how_it_ended(code)
    if to_goal is not None:
        return "reached", ""
    return ("missed", "") if heard else ("nothing reported", "")
