"""Proof: everything a tune measured, as plain data, written to `hasten-report.json`.

`docs/report-schema.md` documents the fields for users; `SCHEMA` changes when their meaning does.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from hasten import files
from hasten.check.agreement import Agreement
from hasten.check.result import CheckResult
from hasten.evidence import Machine
from hasten.evidence.figures import percent
from hasten.evidence.plain import read_plain
from hasten.online.candidates import Skipped
from hasten.plan import Setting
from hasten.tuner.report_paths import without_paths

SCHEMA = "hasten-report/2"


def in_words(ratio: Ratio) -> str:
    """Return a ratio with its interval as text: "1.83x [1.75, 1.90]"."""
    return f"{ratio.ratio:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"


def beside_others(disturbed: float | None) -> str:
    """Return the caveat of a disturbed figure (" while others took 45 % of the CPU"); "" for a quiet one."""
    return "" if disturbed is None else f" while others took {percent(disturbed)} of the CPU"


class Answer(StrEnum):
    """The verdict on a promise."""

    HOLDS = "holds"
    DOES_NOT = "does not hold"
    NOT_KNOWN = "not known"


@dataclass(frozen=True)
class Ratio:
    """Speed-up: baseline time / plan time, with its interval."""

    ratio: float
    low: float
    high: float
    confidence: float = 0.95


@dataclass(frozen=True)
class FullRun:
    """The full training's time, estimated from trials: start-up, first epoch, later epochs.

    `epochs_known_from` says where the number of epochs comes from ("--epochs 90" on the command line), or that it is
    assumed.
    """

    epochs: int
    epochs_known_from: str
    baseline_seconds: float
    plan_seconds: float
    ratio: float
    baseline_startup_seconds: float
    plan_startup_seconds: float
    break_even_epochs: int | None


@dataclass(frozen=True)
class ParityCheck:
    """One quantity compared between paired runs: same seed, same order of samples on both sides.

    Attributes:
        what: "training loss", "validation loss" or "batches a pass".
        baseline: Its value in each baseline run.
        plan: Its value in each run of the plan, in the same order.
        change: Mean relative difference plan / baseline - 1, a fraction: 0.01 is 1 % higher under the plan.
        low: Lower end of its 95 % interval.
        high: Upper end.
        detectable: The smallest relative change that would have been seen, a fraction.
        ok: Whether the interval holds 0, or what it shows is within the tolerance of the test.
    """

    what: str
    baseline: tuple[float, ...]
    plan: tuple[float, ...]
    change: float
    low: float
    high: float
    detectable: float
    ok: bool


@dataclass(frozen=True)
class Parity:
    """Whether the plan trains to the same losses.

    Attributes:
        answer: Holds, does not hold, or not known.
        test: How it was judged, in a sentence.
        checks: Quantities compared between paired runs.
        note: Reasons and remarks.
    """

    answer: Answer
    test: str
    checks: tuple[ParityCheck, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Memory:
    """Peak memory in bytes: of the whole process tree, and of the GPU if there is one."""

    baseline_bytes: int
    plan_bytes: int
    baseline_gpu_bytes: int | None = None
    plan_gpu_bytes: int | None = None


@dataclass(frozen=True)
class KeptTechnique:
    """A technique of the plan.

    Attributes:
        contribution: Speed-up of a step by this technique, with the rest of the plan on.
        contribution_low: Lower end of its 95 % interval.
        contribution_high: Upper end of the interval.
        helps: Probability that it helps at all, from 0 to 1; None if it was not measured separately.
        blocks: Number of blocks in which it was on (trials, if the proof is not `warm`).
        why: What in the evidence speaks for it.
    """

    name: str
    setting: Setting
    effect: str
    contribution: float
    contribution_low: float
    contribution_high: float
    helps: float | None
    blocks: int
    why: str


@dataclass(frozen=True)
class TriedSetting:
    """A setting that was tried.

    Attributes:
        outcome: kept, lost, dropped, crashed, timeout, out of memory, nan.
        ratio: Speed-up of a step by it; `low` and `high` are the 95 % interval.
        helps: Probability that it helps at all, from 0 to 1; None if unknown.
        blocks: Number of blocks in which it was on (trials, if the proof is not `warm`).
    """

    name: str
    setting: Setting
    outcome: str
    reason: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    helps: float | None = None
    blocks: int = 0


@dataclass(frozen=True)
class Block:
    """Some measured steps of a running process under one set of techniques.

    Attributes:
        at: Seconds since the tune began.
        seconds: Total seconds of its measured steps.
        steps: Number of measured steps.
        step_seconds: Mean seconds per step; may be 0 for a block that does not count.
        on: Techniques that were on: names, or `name=setting` for one with several settings here; empty for the
            unchanged script.
        part: "as it is", "all on", "search", "play-off", "compile" or "claim".
        trouble: Why it does not count; "" if it does.
        taken: Share of the CPU that others (other processes, the hypervisor) took, from 0 to 1; None if unknown.
        disturbed: Whether that may have changed its pace.
    """

    at: float
    seconds: float
    steps: int
    step_seconds: float
    on: tuple[str, ...]
    part: str
    trouble: str = ""
    taken: float | None = None
    disturbed: bool = False


@dataclass(frozen=True)
class MachineNoise:
    """How busy the machine was otherwise.

    Attributes:
        steal: Share of CPU time that the hypervisor gave to others, from 0 to 1; None if it is not reported.
        others: Share of all cores that other processes used, from 0 to 1 (0.4 of 2 cores is 0.8 cores); None if
            unknown.
        scatter: Standard deviation of a block's pace around the model's prediction, as a fraction.
    """

    steal: float | None
    others: float | None
    scatter: float | None


@dataclass(frozen=True)
class Pair:
    """Seconds per steady step of a baseline process and of the plan's process beside it, with the same seed.

    `disturbed` is the share of the CPU that others took meanwhile, from 0 to 1; None if they were not disturbed.
    """

    seed: int
    baseline: float
    plan: float
    disturbed: float | None = None


@dataclass(frozen=True)
class Curves:
    """Training loss by step, one curve per seed, thinned to at most about 200 points."""

    steps: tuple[int, ...]
    baseline: tuple[tuple[float, ...], ...]
    plan: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class TrialRow:
    """One process that was measured. Times in seconds; `step_seconds` is of steady steps."""

    plan: dict[str, Setting]
    seed: int
    outcome: str
    reason: str
    seconds: float
    step_seconds: float | None = None
    epoch_seconds: float | None = None
    startup_seconds: float | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class Proof:
    """Everything one `hasten tune` measured.

    Attributes:
        speedup: The claim: baseline and plan in turn (A B B A), in blocks measured after the plan was chosen.
        speedup_how: How it was measured, in a sentence.
        disturbed: Share of the CPU that others took while the claim was measured, from 0 to 1; then it is not proven.
            None if it was not disturbed, or that could not be seen.
        epoch_speedup: Speed-up of whole epochs, with validation and the start of passes, from pairs of fresh processes.
        phases: Mean seconds of each phase of a step, "baseline" and "plan", from the blocks of the claim. If their
            sums do not have the ratio of `speedup`, the page says so.
        pairs: Pairs of fresh processes, which include what a running process hides (start-up, filling caches).
        warm: Whether the search measured blocks of one running process; otherwise trials in separate processes, and
            `notes` says why.
        spent_seconds: Stage -> seconds it took.
        would_ask: What tune would still measure with more time, one sentence each, without a full stop.
        blocks: All blocks in order.
    """

    created: str
    hasten: str
    command: tuple[str, ...]
    machine: Machine
    versions: dict[str, str]
    speedup: Ratio
    speedup_how: str
    epoch_speedup: Ratio | None
    full_run: FullRun | None
    parity: Parity
    memory: Memory
    phases: dict[str, dict[str, float]]
    curves: Curves
    pairs: tuple[Pair, ...]
    techniques: tuple[KeptTechnique, ...]
    tried: tuple[TriedSetting, ...]
    skipped: tuple[Skipped, ...]
    trials: tuple[TrialRow, ...]
    budget_seconds: float
    used_seconds: float
    spent_seconds: dict[str, float] = field(default_factory=dict)
    warm: bool = True
    agreement: Agreement | None = None
    blocks: tuple[Block, ...] = ()
    would_ask: tuple[str, ...] = ()
    noise: MachineNoise | None = None
    notes: tuple[str, ...] = ()
    taps_skipped: tuple[str, ...] = ()
    check: CheckResult | None = None
    disturbed: float | None = None
    schema: str = field(default=SCHEMA)

    @property
    def proven(self) -> Answer:
        """Whether the plan is faster and trains alike: shown, refuted, or (partly) not known."""
        checked = self.check.ok if self.check is not None else None
        if checked is False or self.parity.answer is Answer.DOES_NOT:
            return Answer.DOES_NOT
        if self.disturbed is not None:
            return Answer.NOT_KNOWN
        if self.speedup.high < 1:
            return Answer.DOES_NOT
        if checked and self.parity.answer is Answer.HOLDS and self.speedup.low > 1 and (self.fresh or 0) > 1:
            return Answer.HOLDS
        return Answer.NOT_KNOWN

    @property
    def fresh(self) -> float | None:
        """Median speed-up of the pairs of fresh processes; None without a pair."""
        ratios = [pair.baseline / pair.plan for pair in self.pairs if pair.plan > 0]
        return statistics.median(ratios) if ratios else None

    def without_paths(self) -> Proof:
        """Return this proof with all paths relative to the working folder, as it is shown and written."""
        return without_paths(self)

    def to_json(self) -> str:
        """Return the text of `hasten-report.json`, with paths relative to the working folder."""
        return json.dumps(dataclasses.asdict(self.without_paths()), indent=1, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Write `hasten-report.json` atomically."""
        files.write_own(path, self.to_json(), "the report", is_report, "name another folder with --out")

    @classmethod
    def read(cls, path: Path) -> Proof:
        """Read a `hasten-report.json`.

        Raises:
            HastenError: The file is missing, is not JSON, or has another schema.
        """
        advice = "run `hasten tune` again to write a new one"
        return read_plain(cls, path, SCHEMA, "a report", advice, missing="no such report:")


is_report = files.json_of(SCHEMA)
