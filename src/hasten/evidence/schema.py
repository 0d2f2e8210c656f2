"""Evidence: what one run leaves behind. Plain data, written to JSON, readable without torch.

Times are seconds on one monotonic clock that starts at 0 when the process does.
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
    Line,
    Measurement,
    MemoryPoint,
    Sampled,
    Stages,
    Surroundings,
    TriedLive,
    Use,
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
"""Parts that most steps do not have: a steady step's length is without them."""


def net_seconds(phases: Sequence[float]) -> float:
    """Seconds of a step, by its phases, without validation and checkpoints."""
    return sum(phases) - sum(phases[phase] for phase in ASIDE)


@dataclass(frozen=True)
class ModelFacts:
    """One outermost module that the script called. `layers`: class name -> how many."""

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
        fusable: torch has a fused kernel for it and these parameters.
        options: Of its first group: lr, weight_decay, momentum and the like.
        schedule: Class of the learning-rate scheduler on it, "" if none was seen.
        rates: Distinct learning rates its steps were made with, in order (at most 64).
        shapes: Of its parameters (at most 2000).
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
    """Global switches as the script left them, and what it was seen to use."""

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
    """One time through a loader: from `iter(loader)` to its end.

    Attributes:
        start: When `iter(loader)` was called, which starts its workers.
        first: When its first batch came.
        opened: When `iter(loader)` returned; 0 where that is not known.
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
    """Evidence that one run leaves behind.

    Attributes:
        step_start: When each training step began.
        step_phases: Per step, seconds by `PHASES`; they add up to the step.
        losses: Per step, the sum of the losses that `backward` was called on; None where there is no finite one or it
            was not kept (a trial keeps all, other runs those of 200 steps, then of every eighth).
        steps: How many training steps there were.
        every: Of so many steps one is kept, in `step_start`, `step_phases` and `losses`; more than 1 in a long run.
        numbers: Number (from 0) of each step that is kept; empty: see `number`.
        aside: Seconds by `PHASES` of validation and checkpoints in the steps that are not kept; empty: none.
        bad_losses: How many of the losses were NaN or infinite.
        step_of: "batch" (a step is a batch of the training loader) or "optimizer" (an optimizer step, or a
            backward in a script that has no optimizer).
        ended: "finished" (the script ended), "complete" (the trial or doctor had what it wanted), "failed",
            "stopped" (by Ctrl-C or SIGTERM).
        error: The exception that ended the script, and where.
        skipped: What a tap could not do and why; the script went on without it.
        installed: Technique -> what it did ("2 loaders"), of those that found something to act on.
        peak_gpu_bytes: Peak memory torch had allocated on the GPU.
        origin: The machine's monotonic clock (`time.perf_counter`) when this run's clock stood at 0.
        pid: Of the process that trained.
        rank: Of it among `flags.distributed`.
        listened: Who listened, and how closely: "trial", "run", "trainer" or "doctor"; "live": it was killed, and this
            is what its live file held.
        stopped_at: Where the script was (`file:line`) when it was cut before its first step was over, or in the middle
            of a later one; "" otherwise.
        unfinished: Where no whole step was seen although the run trained: seconds of the first so far, by `PHASES`.
        device_clock: Phases are times on the GPU (CUDA events), not of the calls that start its work.
        disturbed: Numbers of the steps (from 0) whose time does not count, since they were looked into.
        events, layers, lines, sampled, inputs, stages, use, surroundings, memory: See `hasten.evidence.observed`;
            `memory` is over time. Empty where nobody looked.
        strays: Paths of the layers whose parameters get gradients that no optimizer uses.
        measured: What was tried on the machine after the run (`hasten.doctor.verdict.measure`).
        tried: What was switched on and off in the run itself, behind the steps that are kept here.
        loader_bench: How fast the training loader goes with no training behind it; None where that was not asked for.
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
    lines: tuple[Line, ...] = ()
    strays: tuple[str, ...] = ()
    sampled: Sampled | None = None
    inputs: Inputs | None = None
    stages: tuple[Stages, ...] = ()
    use: Use | None = None
    surroundings: Surroundings | None = None
    memory: tuple[MemoryPoint, ...] = ()
    measured: tuple[Measurement, ...] = ()
    tried: tuple[TriedLive, ...] = ()
    loader_bench: LoaderBench | None = None
    schema: str = SCHEMA

    def number(self, index: int) -> int:
        """Number (from 0) of a step that is kept."""
        return self.numbers[index] if self.numbers else index * self.every

    @property
    def step_seconds(self) -> list[float]:
        """Length of each step."""
        return [sum(phases) for phases in self.step_phases]

    def share(self, phase: Phase) -> float:
        """This phase's share of the steady steps, 0 to 1 (validation and checkpoints left out)."""
        steady = self.step_phases[len(self.step_phases) // 2 :]
        total = sum(map(net_seconds, steady))
        return sum(step[phase] for step in steady) / total if total > 0 else 0.0

    def steady(self) -> list[int]:
        """Indices into `step_phases` of the steps that count: neither the first ten nor those that were disturbed.

        Of a run so short that none is left: all that were not disturbed, without the first if there is another; or
        else all.
        """
        first = min(10, len(self.step_phases) // 2)
        left_out = set(self.disturbed)
        undisturbed = [index for index in range(len(self.step_phases)) if self.number(index) not in left_out]
        steady = [index for index in undisturbed if index >= first]
        return steady or undisturbed[1:] or undisturbed or list(range(len(self.step_phases)))

    def mean(self, phase: Phase) -> float:
        """Mean seconds of a steady step that went to `phase`; 0 without steps.

        Where not all steps are kept, validation and checkpoints are counted in all of them all the same.
        """
        if self.every > 1 and self.steps and phase in ASIDE:
            aside = self.aside[phase] if self.aside else 0.0
            return (sum(phases[phase] for phases in self.step_phases) + aside) / self.steps
        steady = self.steady()
        return sum(self.step_phases[index][phase] for index in steady) / len(steady) if steady else 0.0

    def events_of(self, *kinds: str) -> list[Event]:
        """The events of these kinds, the costliest first."""
        return sorted((e for e in self.events if e.kind in kinds), key=lambda e: (-e.seconds, -e.count))

    def measured_for(self, finding: str) -> list[Measurement]:
        """Return what was tried for this rule and could be measured."""
        return [one for one in self.measured if one.finding == finding and not one.failed]

    def tried_live(self, finding: str) -> TriedLive | None:
        """Return what switching this rule's cure in the run showed; None where it was not switched, or failed."""
        return next((one for one in self.tried if one.finding == finding and not one.failed), None)

    @property
    def used(self) -> Use:
        """The use of the machine; without samples where nobody took any."""
        return self.use or Use()

    @property
    def train_loader(self) -> LoaderFacts | None:
        """The loader whose batches were trained on; None for a script without one."""
        return next((loader for loader in self.loaders if loader.role == "train"), None)

    def write(self, path: Path) -> None:
        """Write as JSON, whole or not at all (a pipe or a device is written to as it is).

        Raises:
            HastenError: It cannot be written, or the file holds something other than evidence.
        """
        text = json.dumps(finite(dataclasses.asdict(self)), allow_nan=False)
        write_own(path, text, "the evidence", is_evidence)


is_evidence = json_of(SCHEMA)


def read_evidence(path: Path) -> Evidence:
    """Read what a run left behind.

    Raises:
        HastenError: No such file, not readable, not JSON, another schema, or its parts do not fit together.
    """
    evidence = read_plain(Evidence, path, SCHEMA, "evidence", "listen again with this hasten")
    if wrong := misfit(evidence):
        raise HastenError(f"{path} is not whole evidence: {wrong}", "listen again")
    return evidence


def misfit(evidence: Evidence) -> str:
    """Say what of a run's steps does not fit together; "" where all does."""
    many = len(evidence.step_start)
    for name in ("step_phases", "losses", "numbers"):
        found = len(getattr(evidence, name))
        if found != many and (found or name != "numbers"):
            return f"{name} has {found} entries, step_start {many}"
    rows = {"step_phases": evidence.step_phases, "aside": (evidence.aside,), "unfinished": (evidence.unfinished,)}
    for name, all_phases in rows.items():
        for phases in all_phases:
            if len(phases) != len(PHASES) and (phases or name == "step_phases"):
                return f"an entry of {name} has {len(phases)} phases, not {len(PHASES)}"
    if evidence.every < 1 or evidence.steps < 0:
        return f"every is {evidence.every} and steps {evidence.steps}"
    return ""
