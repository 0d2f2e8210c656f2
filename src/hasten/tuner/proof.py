"""Proof: what a tune measured, as plain data; written to `hasten-report.json`.

The fields are documented for users in `docs/report-schema.md`; `SCHEMA` changes when their meaning does.
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
from hasten.check.checked import Checked
from hasten.evidence import Machine
from hasten.evidence.figures import percent
from hasten.evidence.plain import read_plain
from hasten.online.candidates import Skipped
from hasten.plan import Setting
from hasten.tuner.report_paths import without_paths

SCHEMA = "hasten-report/2"


def in_words(ratio: Ratio) -> str:
    """A ratio with its interval in short: "1.83x [1.75, 1.90]"."""
    return f"{ratio.ratio:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"


def beside_others(disturbed: float | None) -> str:
    """What makes a figure doubtful that others disturbed: " while others took 45 % of the CPU"; "" for a quiet one."""
    return "" if disturbed is None else f" while others took {percent(disturbed)} of the CPU"


class Answer(StrEnum):
    """The verdict on a promise."""

    HOLDS = "holds"
    DOES_NOT = "does not hold"
    NOT_KNOWN = "not known"


@dataclass(frozen=True)
class Ratio:
    """How many times faster: baseline time / plan time, with its interval."""

    ratio: float
    low: float
    high: float
    confidence: float = 0.95


@dataclass(frozen=True)
class FullRun:
    """The whole training, estimated from the trials: start-up, first epoch, later epochs.

    `epochs_known_from` says where the number of epochs was read ("--epochs 90" on the command line), or that
    it is assumed.
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
        answer: Holds, does not hold, not known.
        test: How that was judged, in a sentence.
        checks: What was compared between paired runs.
        note: What else there is to say.
    """

    answer: Answer
    test: str
    checks: tuple[ParityCheck, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Memory:
    """Peak memory in bytes: of the whole process tree, and of the GPU where there is one."""

    baseline_bytes: int
    plan_bytes: int
    baseline_gpu_bytes: int | None = None
    plan_gpu_bytes: int | None = None


@dataclass(frozen=True)
class KeptTechnique:
    """A technique of the plan.

    Attributes:
        contribution: How many times faster a step is with it than without, the rest of the plan on.
        contribution_low: Lower end of its 95 % interval.
        contribution_high: Upper end.
        helps: Probability that it helps at all, from 0 to 1; None where it was not asked apart from others.
        blocks: Blocks that it was measured in, on or off; trials where the proof is not `warm`.
        why: What of the evidence speaks for it.
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
class Tried:
    """A setting that was measured.

    Attributes:
        outcome: kept, lost, dropped, crashed, timeout, out of memory, nan.
        ratio: How many times faster a step is with it than without; `low` and `high` are its 95 % interval.
        helps: Probability that it helps at all, from 0 to 1; None where that is not known.
        blocks: Blocks that it was measured in, on or off; trials where the proof is not `warm`.
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
    """Some steps of the warm process under one set of techniques.

    Attributes:
        at: Seconds since the tune began.
        seconds: How long its measured steps took.
        steps: How many they are.
        step_seconds: Their mean length; of a block in trouble it may be 0.
        on: What was on: names, or `name=setting` where a technique has several settings here; empty for the
            script as it was.
        part: "all on", "search", "compile" or "claim".
        trouble: Why it was not counted; "" for a good block.
        taken: Share of the CPU that others (other processes, the hypervisor) took meanwhile, from 0 to 1; None where
            that could not be seen.
        disturbed: Whether its pace may be due to that.
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
    """How much else happened on the machine meanwhile.

    Attributes:
        steal: Share of CPU time that the hypervisor gave to others, from 0 to 1; None where it is not told.
        others: Share of all cores that other processes kept busy, from 0 to 1 (0.4 of 2 cores is 0.8 cores); None
            where that could not be seen.
        scatter: Standard deviation of a block's pace around what the model of the blocks expects, as a fraction.
    """

    steal: float | None
    others: float | None
    scatter: float | None


@dataclass(frozen=True)
class Pair:
    """Seconds per steady step of one baseline process and the plan's process beside it, same seed.

    `disturbed` is the share of the CPU that others took of them, from 0 to 1; None where nobody disturbed them.
    """

    seed: int
    baseline: float
    plan: float
    disturbed: float | None = None


@dataclass(frozen=True)
class Curves:
    """Training loss by step, one line a seed, thinned to at most 200 points."""

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
        speedup: The claim: baseline and plan in turn, A B B A, on blocks measured after the plan was chosen.
        speedup_how: How that was measured, in a sentence.
        disturbed: Share of the CPU that others took while the claim was measured, from 0 to 1: then it is not proven;
            None where it was measured on a quiet machine, or that could not be seen.
        epoch_speedup: The same with validation and the starts of passes, from pairs of fresh processes.
        phases: Mean seconds of each phase of a step, "baseline" and "plan", from the blocks of the claim: their
            sums have the ratio of `speedup`, or the page says that they have not.
        pairs: Pairs of fresh processes, which also hold what a warm process hides (start-up, caches).
        warm: Whether blocks in one process decided; else trials in processes of their own did, and `notes` says why.
        spent_seconds: What the seconds used went to: stage -> seconds.
        would_ask: What tune would still ask with more time, a sentence each, without a full stop.
        blocks: The course of the search.
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
    tried: tuple[Tried, ...]
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
    check: Checked | None = None
    disturbed: float | None = None
    schema: str = field(default=SCHEMA)

    @property
    def proven(self) -> Answer:
        """Whether the plan is faster and trains alike: both shown, one of them refuted, or something not looked at."""
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
        """How many times faster the plan was in the pairs of fresh processes (their median); None without a pair."""
        ratios = [pair.baseline / pair.plan for pair in self.pairs if pair.plan > 0]
        return statistics.median(ratios) if ratios else None

    def without_paths(self) -> Proof:
        """Return this proof as it is shown: no path of the machine in it, but relative to the working folder."""
        return without_paths(self)

    def to_json(self) -> str:
        """This proof as the text of `hasten-report.json`; paths are relative to the working folder."""
        return json.dumps(dataclasses.asdict(self.without_paths()), indent=1, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Write `hasten-report.json`, whole or not at all."""
        files.write_own(path, self.to_json(), "the report", is_report, "name another folder with --out")

    @classmethod
    def read(cls, path: Path) -> Proof:
        """Read a `hasten-report.json`.

        Raises:
            HastenError: The file is missing, is not JSON, or is of another schema.
        """
        advice = "run `hasten tune` again to write a new one"
        return read_plain(cls, path, SCHEMA, "a report", advice, missing="no such report:")


is_report = files.json_of(SCHEMA)
