"""Diagnosis: what doctor says of a run, as plain data. The views print it, `--json` writes it, `compare` reads it."""

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
            "validation", "checkpoint", "none" (nothing is: under-parallelised, `title` says at which point),
            "loader" (the training loader was measured in place of training), or "untrained" (no step was seen).
        title: The answer in a few words: "data-bound: the step waits 61 % of its time for batches".
        details: Sentences that say how that is known, and what would change it.
    """

    resource: str
    title: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pauses:
    """Time outside steady steps. Seconds; NaN or empty where there was none.

    Attributes:
        start_up: From the process's start to the first step.
        first_step: Length of the first step (compilation, cuDNN's search, allocator).
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
        verdict: The answer.
        phases: Mean seconds of a steady step by phase (`hasten.evidence.PHASES`); they add up to `step`.
        step: Mean seconds of a steady step; `median` and `spread` (interquartile range) likewise; 0 without steps.
        steps: How many training steps were seen.
        counted: How many of them these figures are of: neither the first ones nor those that were looked into.
        blocks: Mean seconds of each of at most 24 stretches of steady steps; their scatter tells how sure `step` is.
        findings: Worst first.
        machine: What the use of CPU, GPU and network says about the machine to rent, in sentences.
        unseen: What could not be seen here, and why.
        notes: What was done to the run: cut after 200 steps, writes kept in a scratch folder.
        ended, error, peak_memory_bytes, peak_gpu_bytes: As in the evidence.
        loader_bench: As in the evidence.
        ran_on: The machine; None where it is not known. `torch`: the version that ran there.
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
        """Plain values; what is not finite is null."""
        plain: dict[str, Any] = finite(dataclasses.asdict(self))
        return plain

    def write(self, path: Path) -> None:
        """Write as JSON, whole or not at all.

        Raises:
            HastenError: The file cannot be written, or holds something else.
        """
        files.write_own(path, json.dumps(self.as_json(), indent=1, allow_nan=False), "the diagnosis", is_diagnosis)


is_diagnosis = files.json_of(SCHEMA)


def read_diagnosis(path: Path) -> Diagnosis:
    """Read what `--json` wrote.

    Raises:
        HastenError: No such file, or not a diagnosis of this schema.
    """
    return read_plain(Diagnosis, path, SCHEMA, "a diagnosis", "run `hasten doctor --json` again")


@contextlib.contextmanager
def makes_sense(path: Path) -> Iterator[None]:
    """Turn errors of reckoning with a file that a person named into one message: no run leaves such values.

    Raises:
        HastenError: Its numbers cannot be reckoned with: a step of 1e308 seconds, a negative count.
    """
    try:
        yield
    except (ArithmeticError, LookupError, ValueError, TypeError, RecursionError, MemoryError) as error:
        what = f"{type(error).__name__}: {error}"
        raise HastenError(f"{path} holds values that no run leaves ({what})", "listen again") from error
