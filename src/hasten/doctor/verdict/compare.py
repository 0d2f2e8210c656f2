"""Runs side by side, before and after: did the step become slower, where, and which findings came and went."""

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
_FEWEST_BLOCKS = 8
_RUNS_THAT_TELL = 3


@dataclass(frozen=True)
class Change:
    """A quantity before and after; `ratio` is after / before, NaN where it was not measured on both sides.

    `low` and `high` are the ends of the ratio's 95 % interval, NaN where there are too few steps for one.
    """

    before: float
    after: float
    low: float = math.nan
    high: float = math.nan

    @property
    def ratio(self) -> float:
        """After / before: 1.1 is 10 % more."""
        return self.after / self.before if self.before > 0 and self.after > 0 else math.nan

    @property
    def sure(self) -> bool:
        """There is an interval, and it leaves 1 out."""
        return self.low > 1 or self.high < 1


@dataclass(frozen=True)
class Comparison:
    """Changes from one run, or several of the same, to another.

    Attributes:
        before, after: What each says of its run; of several, that of the middle one, with the mean of their phases.
        typical: Seconds of a steady step in the median stretch of steps, which a few long steps leave as it is.
        mean: Mean seconds of a steady step, which they do not.
        phases: Mean seconds of a steady step by phase; they add up to `mean` on each side.
        memory, gpu_memory: Peaks in bytes; 0 where not measured.
        came, went: Findings that only the later, or only the earlier, run has; `stayed`: pairs of the others.
        differences: What else is not alike: machine, versions, command.
        limits: What this comparison cannot tell.
    """

    before: Diagnosis
    after: Diagnosis
    typical: Change
    mean: Change
    phases: dict[str, Change] = field(default_factory=dict)
    memory: Change = field(default_factory=lambda: Change(0, 0))
    gpu_memory: Change = field(default_factory=lambda: Change(0, 0))
    came: tuple[Finding, ...] = ()
    went: tuple[Finding, ...] = ()
    stayed: tuple[tuple[Finding, Finding], ...] = ()
    differences: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()

    def slower(self, limit: float) -> bool:
        """The step became slower by more than `limit` (0.05: 5 %), and that stands out of the scatter (`RULE`).

        Raises:
            HastenError: There are too few steps to tell.
        """
        if not (math.isfinite(self.typical.low) and math.isfinite(self.mean.low)):
            raise HastenError(
                f"too few steady steps to tell whether the step became slower: {len(self.before.blocks)} before, "
                f"{len(self.after.blocks)} after, and each run needs {_FEWEST_BLOCKS}",
                "listen to more steps of both",
            )
        return any(one.ratio > 1 + limit and one.low > 1 for one in (self.typical, self.mean))

    def as_json(self) -> dict[str, Any]:
        """Plain values for programs; what is not finite is null."""
        plain = {
            "schema": SCHEMA,
            "rule": RULE,
            "verdict": [self.before.verdict.resource, self.after.verdict.resource],
            "typical": _change(self.typical),
            "mean": _change(self.mean),
            "phases": {name: _change(change) for name, change in self.phases.items()},
            "peak_memory_bytes": _change(self.memory),
            "peak_gpu_bytes": _change(self.gpu_memory),
            "findings_came": [dataclasses.asdict(one) for one in self.came],
            "findings_went": [dataclasses.asdict(one) for one in self.went],
            "findings_stayed": [[dataclasses.asdict(one), dataclasses.asdict(other)] for one, other in self.stayed],
            "differences": list(self.differences),
            "limits": list(self.limits),
        }
        return {key: finite(value) for key, value in plain.items()}


def compare(before: Sequence[Diagnosis], after: Sequence[Diagnosis]) -> Comparison:
    """Put runs side by side.

    Args:
        before: One run, or several of the same training: from three on, the intervals hold how much runs differ.
        after: Likewise.
    """
    one, other = _middle(before), _middle(after)
    came, went, stayed = _findings(one.findings, other.findings)
    old, new = ([list(filter(_amount, run.blocks)) for run in runs] for runs in (before, after))
    names = dict.fromkeys([*PHASES, *one.phases, *other.phases])
    phases = {name: Change(*(_amount(run.phases.get(name)) for run in (one, other))) for name in names}
    return Comparison(
        one,
        other,
        Change(_typical(old), _typical(new), *interval(old, new, statistics.median)),
        Change(_amount(one.step), _amount(other.step), *interval(old, new, statistics.fmean)),
        {name: change for name, change in phases.items() if change.before > 0 or change.after > 0},
        Change(one.peak_memory_bytes, other.peak_memory_bytes),
        Change(one.peak_gpu_bytes or 0, other.peak_gpu_bytes or 0),
        tuple(came),
        tuple(went),
        tuple(stayed),
        tuple(_differences(one, other)),
        tuple(_limits(before, after)),
    )


def _middle(runs: Sequence[Diagnosis]) -> Diagnosis:
    """The run whose step is in the middle, with the mean step and phases of all."""
    middle = sorted(runs, key=lambda run: _amount(run.step))[len(runs) // 2]
    names = dict.fromkeys(name for run in runs for name in run.phases)
    phases = {name: statistics.fmean(_amount(run.phases.get(name)) for run in runs) for name in names}
    return dataclasses.replace(middle, phases=phases, step=statistics.fmean(_amount(run.step) for run in runs))


def _amount(seconds: float | None) -> float:
    """Return what was measured; 0 for what was not."""
    return seconds if seconds is not None and math.isfinite(seconds) and seconds > 0 else 0.0


def _typical(runs: Sequence[Sequence[float]]) -> float:
    """The median stretch, on average over runs; 0 where one has none."""
    return statistics.fmean([statistics.median(blocks) for blocks in runs]) if all(runs) else 0.0


def interval(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], of: Callable[[Sequence[float]], float]
) -> tuple[float, float]:
    """The ends of the 95 % interval of of(after) / of(before), by bootstrap over runs and stretches of their steps.

    Neighbouring stretches are alike (a slow disk, other load), so they are drawn again in rows (Kuensch 1989, moving
    blocks); drawn one by one they would give too narrow an interval. NaN where a run has fewer than eight stretches.

    Args:
        before: The stretches of each run.
        after: Likewise.
        of: What is compared: the median or the mean.
    """
    if any(len(run) < _FEWEST_BLOCKS for run in (*before, *after)):
        return math.nan, math.nan
    draw = random.Random(0)

    def again(runs: Sequence[Sequence[float]]) -> float:
        return statistics.fmean([of(_rows(run, draw)) for run in draw.choices(runs, k=len(runs))])

    ratios = sorted(again(after) / again(before) for _ in range(_RESAMPLES))
    return ratios[int(0.025 * _RESAMPLES)], ratios[int(0.975 * _RESAMPLES)]


def _rows(blocks: Sequence[float], draw: random.Random) -> list[float]:
    """As many of the blocks, drawn in rows that follow each other; the last is followed by the first."""
    row = math.isqrt(len(blocks))
    starts = [draw.randrange(len(blocks)) for _ in range(math.ceil(len(blocks) / row))]
    return [blocks[(start + place) % len(blocks)] for start in starts for place in range(row)][: len(blocks)]


def _findings(
    before: Sequence[Finding], after: Sequence[Finding]
) -> tuple[list[Finding], list[Finding], list[tuple[Finding, Finding]]]:
    """Return findings that came, went and stayed: of the same rule in the same file, nearest lines first."""
    left = list(before)
    came, stayed = [], []
    for one in after:
        same = [other for other in left if _key(other) == _key(one)]
        if not same:
            came.append(one)
            continue
        nearest = min(same, key=lambda other: abs(other.line - one.line))
        left.remove(nearest)
        stayed.append((nearest, one))
    return came, left, stayed


def _key(finding: Finding) -> tuple[str, str]:
    """A script may have moved to another folder, and its lines within it."""
    return finding.name, Path(finding.file).name if finding.file else finding.where


def _differences(before: Diagnosis, after: Diagnosis) -> list[str]:
    one, other = before.ran_on, after.ran_on
    pairs: list[tuple[str, object, object]] = [
        ("command", " ".join(before.command), " ".join(after.command)),
        ("torch", before.torch, after.torch),
        ("hasten", before.hasten, after.hasten),
    ]
    if one is not None and other is not None:
        pairs += [
            ("processor", one.cpu, other.cpu),
            ("cores", one.cores, other.cores),
            ("memory", one.memory_bytes >> 20, other.memory_bytes >> 20),
            ("GPUs", ", ".join(one.gpus) or "none", ", ".join(other.gpus) or "none"),
            ("Python", one.python, other.python),
        ]
    return [f"another {name}: {old} -> {new}" for name, old, new in pairs if old and new and old != new]


def _limits(before: Sequence[Diagnosis], after: Sequence[Diagnosis]) -> list[str]:
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
