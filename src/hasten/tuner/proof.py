"""Proof: what a tune measured, as plain data; written to `hasten-report.json`.

The fields are documented for users in `docs/report-schema.md`; `SCHEMA` changes when their meaning does.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hasten import files
from hasten.check.checked import Checked
from hasten.errors import HastenError
from hasten.evidence import Machine
from hasten.plan import Setting

SCHEMA = "hasten-report/1"


@dataclass(frozen=True)
class Ratio:
    """How many times faster: baseline time / plan time, with its bootstrap interval."""

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
    """One compared quantity: per-seed values of both sides, and the band that the plan's mean must lie in.

    `detectable` is half the band's width as a fraction of the baseline's mean: a smaller change goes unseen.
    """

    what: str
    baseline: tuple[float, ...]
    plan: tuple[float, ...]
    band_low: float
    band_high: float
    plan_mean: float
    detectable: float
    ok: bool


@dataclass(frozen=True)
class Parity:
    """Whether the plan's losses stay inside the baseline's own seed-to-seed band."""

    ok: bool
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
class Kept:
    """A technique of the plan. `contribution` is how many times slower a step is without it (or, where
    `contribution_how` says so, how many times faster it made the plan when it was added)."""

    name: str
    setting: Setting
    effect: str
    contribution: float
    contribution_low: float
    contribution_high: float
    contribution_how: str
    why: str


@dataclass(frozen=True)
class Tried:
    """A setting that was measured. `outcome`: kept, lost, dropped, crashed, timeout, out of memory, nan."""

    name: str
    setting: Setting
    outcome: str
    reason: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Skipped:
    """A technique that was not measured, and why it cannot help or is not safe here."""

    name: str
    reason: str


@dataclass(frozen=True)
class Pair:
    """Seconds per steady step of one baseline trial and the plan's trial beside it, same seed."""

    seed: int
    baseline: float
    plan: float


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
    """Everything one `hasten tune` measured."""

    created: str
    hasten: str
    command: tuple[str, ...]
    machine: Machine
    versions: dict[str, str]
    speedup: Ratio
    epoch_speedup: Ratio | None
    full_run: FullRun | None
    parity: Parity
    memory: Memory
    phases: dict[str, dict[str, float]]
    curves: Curves
    pairs: tuple[Pair, ...]
    techniques: tuple[Kept, ...]
    tried: tuple[Tried, ...]
    skipped: tuple[Skipped, ...]
    trials: tuple[TrialRow, ...]
    budget_seconds: float
    used_seconds: float
    notes: tuple[str, ...] = ()
    taps_skipped: tuple[str, ...] = ()
    check: Checked | None = None
    schema: str = field(default=SCHEMA)

    def to_json(self) -> str:
        """This proof as the text of `hasten-report.json`."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Write `hasten-report.json`, whole or not at all."""
        files.write_own(path, self.to_json(), "the report", is_report, "name another folder with --out")

    @classmethod
    def read(cls, path: Path) -> Proof:
        """Read a `hasten-report.json`.

        Raises:
            HastenError: The file is missing, is not JSON, or is of another schema.
        """
        try:
            data: Any = files.parse_json(files.read_bytes(path))
        except FileNotFoundError:
            raise HastenError(f"no such report: {path}", "`hasten tune` writes one") from None
        except OSError as error:
            raise HastenError(f"cannot read the report {path}: {error}") from None
        except ValueError as error:
            raise HastenError(f"{path} is not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise HastenError(f"{path} is not a report of the schema {SCHEMA}", "write it anew with `hasten tune`")
        try:
            return TypeAdapter(cls).validate_python(data)
        except ValidationError as error:
            raise HastenError(f"{path} does not fit the schema {SCHEMA}: {error}") from None


is_report = files.json_of(SCHEMA)
