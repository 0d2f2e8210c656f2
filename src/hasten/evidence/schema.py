"""Evidence: everything recorded about one run, as plain data that is written to JSON and readable without torch.

Times are in seconds on one monotonic clock, which is 0 when the process starts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from hasten.errors import HastenError
from hasten.evidence.loaders import LoaderBench, LoaderFacts
from hasten.evidence.machine import Machine
from hasten.evidence.observed import (
    Event,
    Inputs,
    Layer,
    LiveTrial,
    MachineUse,
    Measurement,
    MemoryPoint,
    ProcessEnvironment,
    Sampled,
    SampledLine,
    Stages,
)
from hasten.evidence.plain import finite, read_plain
from hasten.files import json_of, write_own

SCHEMA = "hasten-evidence/1"


class Phase(IntEnum):
    """A part of a step; the phases of a step add up to the step."""

    DATA = 0
    TRANSFER = 1
    FORWARD = 2
    BACKWARD = 3
    SYNC = 4
    OPTIMIZER = 5
    VALIDATION = 6
    CHECKPOINT = 7
    OTHER = 8


PHASES = ("data", "transfer", "forward", "backward", "sync", "optimizer", "validation", "checkpoint", "other")
ASIDE = (Phase.VALIDATION, Phase.CHECKPOINT)
"""Phases that most steps do not have; they do not count in a steady step's length."""


def net_seconds(phases: Sequence[float]) -> float:
    """Return the seconds of a step without validation and checkpoints, given its phases."""
    return sum(phases) - sum(phases[phase] for phase in ASIDE)


@dataclass(frozen=True)
class ModelFacts:
    """One outermost module that the script called. `layers`: class name -> number of layers."""

    name: str
    parameters: int
    trained_parameters: int
    layers: dict[str, int]
    dtype: str
    device: str
    compiled: bool
    autocast: str
    train_calls: int
    eval_calls: int
    eval_calls_with_graph: int
    backward_through_eval: bool
    input_shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class OptimizerFacts:
    """One optimizer.

    Attributes:
        fusable: Whether torch has a fused kernel for it and its parameters.
        options: The options of its first parameter group: lr, weight_decay, momentum and the like.
        schedule: Class of its learning-rate scheduler; "" if none was seen.
        rates: The distinct learning rates of its steps, in order (at most 64).
        shapes: Shapes of its parameters (at most 2000).
    """

    name: str
    where: str
    parameters: int
    fused: bool
    foreach: bool | None
    fusable: bool
    why_not_fusable: str
    steps: int
    options: dict[str, float | bool | str] = dataclasses.field(default_factory=dict)
    schedule: str = ""
    rates: tuple[float, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Flags:
    """torch's global switches at the end of the run, and features that the script was seen to use."""

    anomaly: bool = False
    profiler: str = ""
    cudnn_benchmark: bool = False
    matmul_precision: str = "highest"
    threads: int = 0
    deterministic: bool = False
    zeroed_gradients: str = ""
    grad_scaler: bool = False
    distributed: int = 1
    bf16: bool = False
    compiler: str = ""
    torch: str = ""
    cuda: str = ""
    missing_gradients: bool = False
    attention: bool = False
    double_backward: bool = False


@dataclass(frozen=True)
class Pass:
    """One pass through a loader: from `iter(loader)` to its end.

    Attributes:
        start: When `iter(loader)` was called, which starts the workers.
        first: When its first batch came.
        opened: When `iter(loader)` returned; 0 if unknown.
    """

    loader: int
    start: float
    first: float
    end: float
    batches: int
    trained: bool
    opened: float = 0.0


@dataclass(frozen=True)
class Validation:
    """Mean of the losses computed between two training steps in eval mode or without graphs; NaN if it diverged."""

    step: int
    loss: float
    count: int
    at: float


@dataclass(frozen=True)
class Evidence:
    """Everything recorded about one run.

    Attributes:
        step_start: When each training step began.
        step_phases: For each step, seconds by `PHASES`, which add up to the step.
        losses: For each step, the sum of the losses that `backward` was called on; None if there is no finite one or it
            was not kept (a trial keeps all, other runs those of the first 200 steps, then of every eighth).
        steps: Number of training steps.
        every: One of this many steps is kept in `step_start`, `step_phases` and `losses`; more than 1 in a long run.
        numbers: Number (from 0) of each kept step; empty: see `number`.
        aside: Seconds by `PHASES` of validation and checkpoints in the steps that are not kept; empty: none.
        bad_losses: Number of losses that were NaN or infinite.
        step_of: "batch" (a step is a batch of the training loader) or "optimizer" (an optimizer step, or a
            backward in a script that has no optimizer).
        ended: "finished" (the script ended), "complete" (the trial or doctor had recorded enough), "failed",
            "stopped" (by Ctrl-C or SIGTERM).
        error: The exception that ended the script, and where.
        skipped: Failures of taps, with reasons; the script continued without them.
        installed: Technique -> what it acted on ("2 loaders"), for techniques that found something to act on.
        peak_gpu_bytes: Peak memory that torch allocated on the GPU.
        origin: The machine's monotonic clock (`time.perf_counter`) when this run's clock was 0.
        pid: Process id of the process that trained.
        rank: Rank of that process among `flags.distributed`.
        listened: Who recorded the run, and how closely: "trial", "run", "trainer" or "doctor"; "live": the run was
            killed, and this is from its live file.
        stopped_at: Where the script was (`file:line`) when it was ended before its first step was over, or in the
            middle of a later step; "" otherwise.
        unfinished: If the run trained but finished no step: seconds of its first step so far, by `PHASES`.
        device_clock: Whether phases are times on the GPU (CUDA events), not of the calls that launch its work.
        disturbed: Numbers of the steps (from 0) whose time does not count, because they were profiled.
        events, layers, lines, sampled, inputs, stages, use, surroundings, memory: See `hasten.evidence.observed`;
            `memory` is a series over time. Empty if not observed.
        strays: Paths of the layers whose parameters get gradients that no optimizer uses.
        measured: Changes benchmarked on the machine after the run (`hasten.doctor.verdict.measure`).
        tried: Techniques switched on and off in the run itself, after the steps that are kept here.
        loader_bench: Speed of the training loader without training; None if not asked for.
    """

    command: tuple[str, ...]
    machine: Machine
    flags: Flags
    loaders: tuple[LoaderFacts, ...]
    models: tuple[ModelFacts, ...]
    optimizers: tuple[OptimizerFacts, ...]
    step_start: tuple[float, ...]
    step_phases: tuple[tuple[float, ...], ...]
    losses: tuple[float | None, ...]
    validations: tuple[Validation, ...]
    passes: tuple[Pass, ...]
    step_of: str
    ended: str
    ended_at: float
    steps: int = 0
    every: int = 1
    numbers: tuple[int, ...] = ()
    aside: tuple[float, ...] = ()
    bad_losses: int = 0
    error: str = ""
    skipped: tuple[str, ...] = ()
    installed: dict[str, str] = dataclasses.field(default_factory=dict)
    peak_memory_bytes: int = 0
    peak_gpu_bytes: int | None = None
    origin: float = 0.0
    pid: int = 0
    rank: int = 0
    listened: str = ""
    stopped_at: str = ""
    unfinished: tuple[float, ...] = ()
    device_clock: bool = False
    disturbed: tuple[int, ...] = ()
    events: tuple[Event, ...] = ()
    layers: tuple[Layer, ...] = ()
    lines: tuple[SampledLine, ...] = ()
    strays: tuple[str, ...] = ()
    sampled: Sampled | None = None
    inputs: Inputs | None = None
    stages: tuple[Stages, ...] = ()
    use: MachineUse | None = None
    surroundings: ProcessEnvironment | None = None
    memory: tuple[MemoryPoint, ...] = ()
    measured: tuple[Measurement, ...] = ()
    tried: tuple[LiveTrial, ...] = ()
    loader_bench: LoaderBench | None = None
    schema: str = SCHEMA

    def number(self, index: int) -> int:
        """Return the number (from 0) of a kept step, given its index."""
        return self.numbers[index] if self.numbers else index * self.every

    @property
    def step_seconds(self) -> list[float]:
        """Seconds of each kept step."""
        return [sum(phases) for phases in self.step_phases]

    def share(self, phase: Phase) -> float:
        """Return a phase's share of the later half of the steps, 0 to 1 (excluding validation and checkpoints)."""
        steady = self.step_phases[len(self.step_phases) // 2 :]
        total = sum(map(net_seconds, steady))
        return sum(step[phase] for step in steady) / total if total > 0 else 0.0

    def steady(self) -> list[int]:
        """Return the indices into `step_phases` of the steady steps: neither the first ten nor disturbed ones.

        In a run of less than 20 steps the first half is warm-up. If no step is left: all undisturbed steps, without the
        first if there are others; if there are none, all steps.
        """
        first = min(10, len(self.step_phases) // 2)
        left_out = set(self.disturbed)
        undisturbed = [index for index in range(len(self.step_phases)) if self.number(index) not in left_out]
        steady = [index for index in undisturbed if index >= first]
        return steady or undisturbed[1:] or undisturbed or list(range(len(self.step_phases)))

    def mean(self, phase: Phase) -> float:
        """Return the mean seconds of a phase in a steady step; 0 without steps.

        Validation and checkpoints are counted over all steps if not all steps are kept.
        """
        if self.every > 1 and self.steps and phase in ASIDE:
            aside = self.aside[phase] if self.aside else 0.0
            return (sum(phases[phase] for phases in self.step_phases) + aside) / self.steps
        steady = self.steady()
        return sum(self.step_phases[index][phase] for index in steady) / len(steady) if steady else 0.0

    def events_of(self, *kinds: str) -> list[Event]:
        """Return the events of these kinds, the slowest first."""
        return sorted((e for e in self.events if e.kind in kinds), key=lambda e: (-e.seconds, -e.count))

    def measured_for(self, finding: str) -> list[Measurement]:
        """Return the successful measurements of changes that a rule suggests."""
        return [change for change in self.measured if change.finding == finding and not change.failed]

    def tried_live(self, finding: str) -> LiveTrial | None:
        """Return the result of switching a rule's cure on and off in the run; None if it was not tried, or failed."""
        return next((trial for trial in self.tried if trial.finding == finding and not trial.failed), None)

    @property
    def used(self) -> MachineUse:
        """The use of the machine; without samples if it was not observed."""
        return self.use or MachineUse()

    @property
    def train_loader(self) -> LoaderFacts | None:
        """The training loader; None if there is none."""
        return next((loader for loader in self.loaders if loader.role == "train"), None)

    def write(self, path: Path) -> None:
        """Write the evidence as JSON, atomically (a pipe or a device is written to directly).

        Raises:
            HastenError: The file cannot be written, or holds something other than evidence.
        """
        text = json.dumps(finite(dataclasses.asdict(self)), allow_nan=False)
        write_own(path, text, "the evidence", is_evidence)


is_evidence = json_of(SCHEMA)


def read_evidence(path: Path) -> Evidence:
    """Read the evidence of a run.

    Raises:
        HastenError: The file does not exist, is not readable, is no JSON, has another schema, or is inconsistent.
    """
    evidence = read_plain(Evidence, path, SCHEMA, "evidence", "listen again with this hasten")
    if wrong := misfit(evidence):
        raise HastenError(f"{path} is not whole evidence: {wrong}", "listen again")
    return evidence


def misfit(evidence: Evidence) -> str:
    """Return how the fields of a run's steps contradict each other, or ""."""
    count = len(evidence.step_start)
    for name in ("step_phases", "losses", "numbers"):
        length = len(getattr(evidence, name))
        if length != count and (length or name != "numbers"):
            return f"{name} has {length} entries, step_start {count}"
    rows = {"step_phases": evidence.step_phases, "aside": (evidence.aside,), "unfinished": (evidence.unfinished,)}
    for name, all_phases in rows.items():
        for phases in all_phases:
            if len(phases) != len(PHASES) and (phases or name == "step_phases"):
                return f"an entry of {name} has {len(phases)} phases, not {len(PHASES)}"
    if evidence.every < 1 or evidence.steps < 0:
        return f"every is {evidence.every} and steps {evidence.steps}"
    return ""
