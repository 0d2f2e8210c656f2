"""Run a whole training in a separate process, with other arguments or a plan, and read the quality from its output.

The script's files go to a scratch folder. It trains at full speed: no step is timed, and each reported line gets its
time from the parent process, as it arrives.
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
from hasten.target.readings import LOGGED, PRINTED, FileTail, Kind, Reading, Readings
from hasten.target.run_observer import VARIABLE
from hasten.techniques import toml_value
from hasten.tuner.trial import last_lines

_LOOK = 0.05  # seconds between two reads of the output
_DEAD = ("crashed", "out of memory", "nothing reported", "idle")
_NEVER = 1 << 62  # batches, epochs and steps that bound nothing


@dataclass(frozen=True)
class Candidate:
    """A candidate to try: other values of the script's arguments, techniques, or both.

    Attributes:
        arguments: Name -> value, as on the command line.
        plan: Technique -> setting.
        why: Where the values come from.
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
    """A finished run of the training.

    Attributes:
        candidate: The arguments and techniques it ran with.
        share: Share of the script's own length, from 0 to 1.
        seed: Offset added to the script's seeds.
        part: Part of the search: "first", "halving", "shorter", "longer" or "fresh seeds".
        outcome: "reached", "missed", "slower" (stopped because it took too long to be of use), "crashed", "out of
            memory", "nothing reported" or "idle" (its techniques found nothing to act on).
        seconds: Seconds that it ran.
        to_goal: Seconds until a reading met the goal; None: none did, or the run has no valid result.
        whole: Whether the script exited by itself with code 0, so that `seconds` is its full duration.
        readings: The reported values of the quality.
        reason: Why it failed, in one line.
        log: The last lines of output, if it crashed.
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
    def has_result(self) -> bool:
        """Whether the run has a result: it neither crashed, was idle nor reported nothing."""
        return self.outcome not in _DEAD

    @property
    def reached(self) -> bool:
        """Whether the run reached the goal."""
        return self.to_goal is not None


@dataclass
class FullRuns:
    """Runs a training several times, one run after the other.

    Args:
        arguments: Command line of the process that runs the training.
        command: The training's command line.
        scratch: Folder for the files that the runs write.
        goal: The quality to be reached.
        only: Text that a printed line must contain to count; "": every line counts.
        deadline: Time on the monotonic clock at which a run is stopped; None: no deadline.

    Attributes:
        kind: Which of the reported numbers is the quality; None until the first run showed it.
        finished: The finished runs.
        facts: Facts that the first run reported about its arguments, loader and optimizer.
    """

    arguments: Sequence[str]
    command: tuple[str, ...]
    scratch: Path
    goal: Goal
    only: str = ""
    deadline: float | None = None
    kind: Kind | None = None
    finished: list[FullRun] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)

    def run_unchanged(self) -> tuple[FullRun, Readings]:
        """Run the unchanged script; return the run and its readings, and keep its `facts`."""
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
            candidate: The arguments and techniques to run with.
            share: Share of the script's own length, for the record.
            seed: Offset added to the script's seeds.
            part: Part of the search, for the record.
            goal: What must be reached within `most`; for a shortened run, easier than the search's goal.
            most: Seconds after which the run is stopped unless it has reached `goal`; None: never.
            stop: Stop the run once it has reached the search's goal, because its remaining duration is not needed.
        """
        return self._run(candidate, share, seed, part, goal, most, stop)[0]

    def _run(
        self, candidate: Candidate, share: float, seed: int, part: str, goal: Goal, most: float | None, stop: bool
    ) -> tuple[FullRun, Readings, list[dict[str, Any]]]:
        folder = self.scratch / f"w{len(self.finished)}"
        folder.mkdir()
        readings = Readings(self.goal, self.only)
        tails = {PRINTED: FileTail(folder / "log"), LOGGED: FileTail(folder / "logged")}
        started_at = time.monotonic()
        late = False
        with (folder / "log").open("wb") as log:
            child = self._start(candidate, seed, folder, log)
            try:
                while (code := child.wait(_LOOK)) is None:
                    now = time.monotonic() - started_at
                    self._read_lines(readings, tails, now)
                    late = most is not None and now > most and self._seconds_to(readings, goal) is None
                    late = late or (self.deadline is not None and time.monotonic() > self.deadline)
                    if late or (stop and self._seconds_to(readings, self.goal) is not None):
                        break
                seconds = time.monotonic() - started_at
            finally:
                child.end()
        self._read_lines(readings, tails, seconds, to_end=True)
        for tail in tails.values():
            tail.close()
        # The first run has no kind yet: its caller chooses one from the readings.
        values = tuple(readings.of_kind(self.kind)) if self.kind is not None else ()
        to_goal = self._seconds_to(readings, self.goal)
        log_end = last_lines(folder / "log")
        outcome, reason = _outcome(code, late, to_goal, bool(values) or self.kind is None, log_end)
        facts = _facts(folder)
        shutil.rmtree(folder, ignore_errors=True)
        idle: dict[str, str] = next((fact["idle"] for fact in facts if "idle" in fact), {}) if candidate.plan else {}
        if idle and outcome in ("reached", "missed"):
            outcome, reason = "idle", "; ".join(f"{name}: {why}" for name, why in idle.items())
        if outcome in ("crashed", "out of memory", "idle"):
            to_goal = None  # such a run has no result, whatever it reported before
        run = FullRun(
            candidate, share, seed, part, outcome, seconds, to_goal, code == 0, values, reason,
            log_end if outcome == "crashed" else "",
        )  # fmt: skip
        self.finished.append(run)
        return run, readings, facts

    def _start(self, candidate: Candidate, seed: int, folder: Path, log: Any) -> Child:
        """Start the training as a trial without bounds, so that it runs to its own end."""
        trial = TrialOptions(str(folder), _NEVER, _NEVER, _NEVER, seconds=float(_NEVER), seed=seed, cut=False)
        observer = DoctorOptions(steps=0, seconds=0.0, sample=False, observers=("hasten.target.run_observer",))
        config = RunConfig(dict(candidate.plan), "", self.command, trial, quiet=True, doctor=observer)
        variables = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", VARIABLE: str(folder)}
        arguments = with_arguments(self.arguments, candidate.arguments)
        stdin = None if is_terminal(sys.stdin) else subprocess.DEVNULL
        return start_logged(arguments, environment(config, {**os.environ, **variables}), log, stdin)

    def _read_lines(
        self, readings: Readings, tails: Mapping[str, FileTail], seconds: float, to_end: bool = False
    ) -> None:
        for source, tail in tails.items():
            for line in tail.lines(to_end):
                readings.add_line(source, line, seconds)

    def _seconds_to(self, readings: Readings, goal: Goal) -> float | None:
        """Return the seconds at which the goal was reached; None while it was not."""
        if self.kind is None:
            return None
        return time_to(goal, readings.of_kind(self.kind))


def _facts(folder: Path) -> list[dict[str, Any]]:
    """Read the facts that a run's process wrote about itself."""
    tail = FileTail(folder / "facts")
    facts = [fact for line in tail.lines(to_end=True) if isinstance(fact := files.parse_json(line), dict)]
    tail.close()
    return facts


def time_to(goal: Goal, readings: Sequence[Reading]) -> float | None:
    """Return the seconds at which a reading first met the goal; None if none did."""
    return next((reading.seconds for reading in readings if goal.is_met(reading.value)), None)


def _outcome(code: int | None, late: bool, to_goal: float | None, has_readings: bool, log: str) -> tuple[str, str]:
    """Return how a run ended, and the reason in one line. `code` is None if the run was stopped."""
    last_line = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
    if code is None:
        return ("slower", "stopped: it took too long") if late else ("reached", "stopped there")
    if code == -signal.SIGKILL or (code and any(pattern in log for pattern in OUT_OF_MEMORY)):
        return "out of memory", last_line or "killed by the kernel"
    if code:
        return "crashed", f"{how_it_ended(code)}: {last_line}" if last_line else how_it_ended(code)
    if to_goal is not None:
        return "reached", ""
    return ("missed", "") if has_readings else ("nothing reported", "")
