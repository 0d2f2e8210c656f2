"""Diagnosis: doctor's conclusions about a run, as plain data. Views show it, `--json` writes it, `compare` reads it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten import files
from hasten.errors import HastenError
from hasten.evidence import Finding, LoaderBench, Machine
from hasten.evidence.plain import finite, read_plain

SCHEMA = "hasten-diagnosis/1"


@dataclass(frozen=True)
class Verdict:
    """Which resource is saturated.

    Attributes:
        resource: "data", "cpu", "transfer", "gpu", "sync" (host syncs and launch gaps), "network", "disk", "memory",
            "validation", "checkpoint", "none" (no resource is saturated: the training is under-parallelised, and
            `title` says where), "loader" (the training loader was measured instead of training), or "untrained" (no
            step was seen).
        title: The answer in a few words: "data-bound: the step waits 61 % of its time for batches".
        details: Sentences on how that is known and what would change it.
    """

    resource: str
    title: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pauses:
    """Time outside steady steps, in seconds; NaN or empty if there was none.

    Attributes:
        start_up: From the process's start to the first step.
        first_step: Length of the first step (compilation, cuDNN's search for kernels, first allocations).
        epoch_starts: Wait for the first batch of each epoch.
        outliers: Numbers of steps over three times as long as the median, with their seconds (at most 20).
        trend: Relative change of the steady step from the first quarter to the last; 0.1: 10 % slower.
    """

    start_up: float = math.nan
    first_step: float = math.nan
    epoch_starts: tuple[float, ...] = ()
    outliers: tuple[tuple[int, float], ...] = ()
    trend: float = 0.0


@dataclass(frozen=True)
class Diagnosis:
    """Doctor's conclusions about one run.

    Attributes:
        verdict: The saturated resource.
        phases: Mean seconds of a steady step by phase (`hasten.evidence.PHASES`); they add up to `step`.
        step: Mean seconds of a steady step; `median` and `spread` (interquartile range) likewise; 0 without steps.
        steps: Number of training steps seen.
        counted: Number of steps that these figures are computed from: without the first steps and profiled ones.
        blocks: Mean seconds of each of at most 24 stretches of steady steps; their scatter tells how sure `step` is.
        findings: Worst first.
        machine: Sentences on the machine to rent, from the use of CPU, GPU, memory and network.
        unseen: Sentences on what could not be observed, and why.
        notes: Sentences on how the run was changed: cut after 200 steps, writes kept in a scratch folder.
        ended, error, peak_memory_bytes, peak_gpu_bytes: As in the evidence.
        loader_bench: As in the evidence.
        ran_on: The machine; None if unknown. `torch`: the torch version that ran there.
    """

    command: tuple[str, ...]
    verdict: Verdict
    phases: dict[str, float] = field(default_factory=dict)
    step: float = 0.0
    median: float = 0.0
    spread: float = 0.0
    steps: int = 0
    counted: int = 0
    blocks: tuple[float, ...] = ()
    pauses: Pauses = field(default_factory=Pauses)
    findings: tuple[Finding, ...] = ()
    machine: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ended: str = ""
    error: str = ""
    peak_memory_bytes: int = 0
    peak_gpu_bytes: int | None = None
    ran_on: Machine | None = None
    loader_bench: LoaderBench | None = None
    torch: str = ""
    hasten: str = ""
    created: str = ""
    schema: str = SCHEMA

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON; NaN and infinity become null."""
        plain: dict[str, Any] = finite(dataclasses.asdict(self))
        return plain

    def write(self, path: Path) -> None:
        """Write the diagnosis as JSON, atomically.

        Raises:
            HastenError: The file cannot be written, or exists and is not a diagnosis.
        """
        files.write_own(path, json.dumps(self.as_json(), indent=1, allow_nan=False), "the diagnosis", is_diagnosis)


is_diagnosis = files.json_of(SCHEMA)


def read_diagnosis(path: Path) -> Diagnosis:
    """Read a diagnosis that `--json` wrote.

    Raises:
        HastenError: There is no such file, or it is not a diagnosis of this schema.
    """
    return read_plain(Diagnosis, path, SCHEMA, "a diagnosis", "run `hasten doctor --json` again")


@contextlib.contextmanager
def makes_sense(path: Path) -> Iterator[None]:
    """Turn any error of computing with the values of a user's file into one message that names the file.

    The file fits the schema, but was edited or damaged: a step of 1e308 seconds, a negative count.

    Args:
        path: The file.

    Raises:
        HastenError: Computing with the file's values failed.
    """
    try:
        yield
    except (ArithmeticError, LookupError, ValueError, TypeError, RecursionError, MemoryError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise HastenError(f"{path} holds values that no run leaves ({cause})", "listen again") from error
