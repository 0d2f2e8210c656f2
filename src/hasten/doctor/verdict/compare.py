"""Compare runs before and after a change: whether the step became slower, in which phase, and which findings changed.

Each side is one run, or several runs of the same training. The 95 % interval of the ratio after / before comes from a
bootstrap over runs and over stretches of their steps (`interval`), so a slow stretch of one run does not look like a
regression. `Comparison.slower` applies `RULE`, which `hasten compare --fail-if-slower` uses.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten.doctor.verdict.diagnosis import Diagnosis
from hasten.errors import HastenError
from hasten.evidence import PHASES, Finding
from hasten.evidence.plain import finite

SCHEMA = "hasten-comparison/1"
RULE = (
    "slower: the typical step (the median over stretches of steps) or the mean step takes longer by more than the "
    "limit, and the 95 % interval of that ratio, from the scatter over runs and over the stretches of each, lies "
    "above 1"
)
_RESAMPLES = 2000
_FEWEST_BLOCKS = 8  # stretches of steps per run; with fewer there is no interval
_RUNS_THAT_TELL = 3  # runs per side; with fewer the interval hardly covers how much whole runs differ


@dataclass(frozen=True)
class Change:
    """A quantity before and after; `ratio` is after / before, NaN unless it was measured on both sides.

    `low` and `high` are the ends of the ratio's 95 % interval, NaN if there are too few steps for an interval.
    """

    before: float
    after: float
    low: float = math.nan
    high: float = math.nan

    @property
    def ratio(self) -> float:
        """The ratio after / before: 1.1 is 10 % more."""
        return self.after / self.before if self.before > 0 and self.after > 0 else math.nan

    @property
    def significant(self) -> bool:
        """Whether there is an interval and it excludes 1."""
        return self.low > 1 or self.high < 1


@dataclass(frozen=True)
class Comparison:
    """Changes from one run, or several of the same training, to another.

    Attributes:
        before, after: Diagnosis of each side; of several runs, that of the run with the median step, with the mean step
            and mean phases of all runs.
        typical: Seconds of a steady step in the median stretch of steps; a few long steps do not change it.
        mean: Mean seconds of a steady step; a few long steps do change it.
        phases: Mean seconds of a steady step by phase; they add up to `mean` on each side.
        memory, gpu_memory: Peaks in bytes; 0 if not measured.
        new_findings, resolved_findings: Findings of the later run only, and of the earlier run only.
        remaining_findings: Pairs (earlier, later) of the findings that both runs have.
        differences: Other differences between the runs: machine, versions, command.
        limits: Sentences on what this comparison cannot tell.
    """

    before: Diagnosis
    after: Diagnosis
    typical: Change
    mean: Change
    phases: dict[str, Change] = field(default_factory=dict)
    memory: Change = field(default_factory=lambda: Change(0, 0))
    gpu_memory: Change = field(default_factory=lambda: Change(0, 0))
    new_findings: tuple[Finding, ...] = ()
    resolved_findings: tuple[Finding, ...] = ()
    remaining_findings: tuple[tuple[Finding, Finding], ...] = ()
    differences: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()

    def slower(self, limit: float) -> bool:
        """Return whether the step became slower by more than `limit` (0.05: 5 %), beyond the scatter (see `RULE`).

        Raises:
            HastenError: There are too few steps to tell.
        """
        if not (math.isfinite(self.typical.low) and math.isfinite(self.mean.low)):
            raise HastenError(
                f"too few steady steps to tell whether the step became slower: {len(self.before.blocks)} before, "
                f"{len(self.after.blocks)} after, and each run needs {_FEWEST_BLOCKS}",
                "listen to more steps of both",
            )
        return any(change.ratio > 1 + limit and change.low > 1 for change in (self.typical, self.mean))

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON; NaN and infinity become null."""
        plain = {
            "schema": SCHEMA,
            "rule": RULE,
            "verdict": [self.before.verdict.resource, self.after.verdict.resource],
            "typical": _change(self.typical),
            "mean": _change(self.mean),
            "phases": {name: _change(change) for name, change in self.phases.items()},
            "peak_memory_bytes": _change(self.memory),
            "peak_gpu_bytes": _change(self.gpu_memory),
            "findings_came": [dataclasses.asdict(finding) for finding in self.new_findings],
            "findings_went": [dataclasses.asdict(finding) for finding in self.resolved_findings],
            "findings_stayed": [
                [dataclasses.asdict(old), dataclasses.asdict(new)] for old, new in self.remaining_findings
            ],
            "differences": list(self.differences),
            "limits": list(self.limits),
        }
        return {key: finite(value) for key, value in plain.items()}


def compare(before: Sequence[Diagnosis], after: Sequence[Diagnosis]) -> Comparison:
    """Compare the runs of two sides.

    Args:
        before: One run, or several of the same training; from three on, the intervals include how much runs differ.
        after: Likewise.
    """
    earlier, later = _middle_run(before), _middle_run(after)
    new, resolved, remaining = _match_findings(earlier.findings, later.findings)
    old_blocks, new_blocks = ([list(filter(_amount, run.blocks)) for run in runs] for runs in (before, after))
    names = dict.fromkeys([*PHASES, *earlier.phases, *later.phases])
    phases = {name: Change(*(_amount(run.phases.get(name)) for run in (earlier, later))) for name in names}
    return Comparison(
        earlier,
        later,
        Change(_typical(old_blocks), _typical(new_blocks), *interval(old_blocks, new_blocks, statistics.median)),
        Change(_amount(earlier.step), _amount(later.step), *interval(old_blocks, new_blocks, statistics.fmean)),
        {name: change for name, change in phases.items() if change.before > 0 or change.after > 0},
        Change(earlier.peak_memory_bytes, later.peak_memory_bytes),
        Change(earlier.peak_gpu_bytes or 0, later.peak_gpu_bytes or 0),
        tuple(new),
        tuple(resolved),
        tuple(remaining),
        tuple(_differences(earlier, later)),
        tuple(_limits(before, after)),
    )


def _middle_run(runs: Sequence[Diagnosis]) -> Diagnosis:
    """Return the run with the median step, with the mean step and mean phases of all runs in place of its own."""
    middle = sorted(runs, key=lambda run: _amount(run.step))[len(runs) // 2]
    names = dict.fromkeys(name for run in runs for name in run.phases)
    phases = {name: statistics.fmean(_amount(run.phases.get(name)) for run in runs) for name in names}
    return dataclasses.replace(middle, phases=phases, step=statistics.fmean(_amount(run.step) for run in runs))


def _amount(seconds: float | None) -> float:
    """Return the seconds, or 0 if they were not measured."""
    return seconds if seconds is not None and math.isfinite(seconds) and seconds > 0 else 0.0


def _typical(runs: Sequence[Sequence[float]]) -> float:
    """Return the seconds of a step in the median stretch, averaged over runs; 0 if a run has no stretches."""
    return statistics.fmean([statistics.median(blocks) for blocks in runs]) if all(runs) else 0.0


def interval(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], statistic: Callable[[Sequence[float]], float]
) -> tuple[float, float]:
    """Return the ends of the 95 % interval of statistic(after) / statistic(before).

    It is a bootstrap over runs and their stretches. Neighbouring stretches are correlated (a slow disk, other load), so
    they are resampled in rows of consecutive stretches (moving blocks, Kuensch 1989); resampling single stretches would
    give too narrow an interval. NaN if a run has fewer than eight stretches.

    Args:
        before: For each run, the mean step seconds of its stretches.
        after: Likewise.
        statistic: The statistic to compare: the median or the mean.
    """
    if any(len(run) < _FEWEST_BLOCKS for run in (*before, *after)):
        return math.nan, math.nan
    rng = random.Random(0)  # fixed seed: the same files always give the same verdict

    def resampled(runs: Sequence[Sequence[float]]) -> float:
        return statistics.fmean([statistic(_moving_blocks(run, rng)) for run in rng.choices(runs, k=len(runs))])

    ratios = sorted(resampled(after) / resampled(before) for _ in range(_RESAMPLES))
    return ratios[int(0.025 * _RESAMPLES)], ratios[int(0.975 * _RESAMPLES)]


def _moving_blocks(blocks: Sequence[float], rng: random.Random) -> list[float]:
    """Return as many blocks, resampled in rows of consecutive blocks; the rows wrap around at the end."""
    row = math.isqrt(len(blocks))
    starts = [rng.randrange(len(blocks)) for _ in range(math.ceil(len(blocks) / row))]
    return [blocks[(start + offset) % len(blocks)] for start in starts for offset in range(row)][: len(blocks)]


def _match_findings(
    before: Sequence[Finding], after: Sequence[Finding]
) -> tuple[list[Finding], list[Finding], list[tuple[Finding, Finding]]]:
    """Return the new, the resolved and the remaining findings.

    A finding remains if the earlier run has one of the same rule in the same file; of several, the one with the nearest
    line is its pair.
    """
    unmatched = list(before)
    new, remaining = [], []
    for finding in after:
        same = [other for other in unmatched if _key(other) == _key(finding)]
        if not same:
            new.append(finding)
            continue
        nearest = min(same, key=lambda other: abs(other.line - finding.line))
        unmatched.remove(nearest)
        remaining.append((nearest, finding))
    return new, unmatched, remaining


def _key(finding: Finding) -> tuple[str, str]:
    """Return the rule and file name; not the folder or line, since the script may have been moved or edited."""
    return finding.name, Path(finding.file).name if finding.file else finding.where


def _differences(before: Diagnosis, after: Diagnosis) -> list[str]:
    """Return a sentence per difference of command, versions and machine; unknown values are not compared."""
    earlier_machine, later_machine = before.ran_on, after.ran_on
    pairs: list[tuple[str, object, object]] = [
        ("command", " ".join(before.command), " ".join(after.command)),
        ("torch", before.torch, after.torch),
        ("hasten", before.hasten, after.hasten),
    ]
    if earlier_machine is not None and later_machine is not None:
        pairs += [
            ("processor", earlier_machine.cpu, later_machine.cpu),
            ("cores", earlier_machine.cores, later_machine.cores),
            ("memory", earlier_machine.memory_bytes >> 20, later_machine.memory_bytes >> 20),
            ("GPUs", ", ".join(earlier_machine.gpus) or "none", ", ".join(later_machine.gpus) or "none"),
            ("Python", earlier_machine.python, later_machine.python),
        ]
    return [f"another {name}: {old} -> {new}" for name, old, new in pairs if old and new and old != new]


def _limits(before: Sequence[Diagnosis], after: Sequence[Diagnosis]) -> list[str]:
    """Return a sentence per reason why the comparison is less certain than it looks."""
    limits = []
    if min(len(before), len(after)) < _RUNS_THAT_TELL:
        runs = "One run a side" if len(before) == len(after) == 1 else f"{len(before)} and {len(after)} runs"
        limits.append(
            f"{runs}: how much whole runs differ from each other (other load, another place in memory) is hardly in "
            f"the interval; name folders with {_RUNS_THAT_TELL} runs each to be sure."
        )
    if any(run.ran_on is None for run in (*before, *after)):
        limits.append("Which machine each ran on is not known.")
    fewest = [min(len(run.blocks) for run in runs) for runs in (before, after)]
    if min(fewest) < _FEWEST_BLOCKS:
        limits.append(
            f"Too few steady steps for an interval: {fewest[0]} before, {fewest[1]} after; each run needs "
            f"{_FEWEST_BLOCKS}."
        )
    return limits


def _change(change: Change) -> dict[str, float]:
    return {**dataclasses.asdict(change), "ratio": change.ratio}
