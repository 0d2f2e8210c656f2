"""What `hasten bench-loader` measured: how fast a training loader goes with no training behind it. Plain data."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from hasten import files
from hasten.evidence import LoaderFacts, Machine, Stages
from hasten.evidence.plain import finite

SCHEMA = "hasten-loader-bench/1"


@dataclass(frozen=True)
class Rate:
    """The loader's speed with one number of workers.

    Attributes:
        workers: How many.
        samples_per_s, batches_per_s: Median over windows of steady drawing; 0 where it failed.
        low, high: The slowest and the fastest window, in samples per second.
        windows, batches: How many were measured.
        first_batch: Seconds from the begin of the first pass to its first batch, workers' start included.
        epoch_start: The same for later passes, with workers that stayed; None if there was no later pass.
        error: Why it could not be measured, or "".
        where: `file:line` of that.
    """

    workers: int
    samples_per_s: float = 0.0
    batches_per_s: float = 0.0
    low: float = 0.0
    high: float = 0.0
    windows: int = 0
    batches: int = 0
    first_batch: float = 0.0
    epoch_start: float | None = None
    error: str = ""
    where: str = ""


@dataclass(frozen=True)
class Consumed:
    """What a training took of its loader, by its evidence. `waited`: share of its steady steps, 0 to 1."""

    samples_per_s: float
    batches_per_s: float
    waited: float
    workers: int


@dataclass(frozen=True)
class LoaderBench:
    """What the bench measured.

    Attributes:
        command: The training's own command line.
        machine: Where it was measured.
        loader: The training loader as the script built it.
        rates: By number of workers, as far as it came.
        stages: Where the time of a batch goes in one process; None if no batch could be sampled.
        stages_workers: With how many workers that was looked at.
        flame: Stacks of a worker under py-spy, folded: "outer;inner 12" a line; "" without one.
        flame_note: Why there is none, and how to get one; or whose it is.
        consumed: What training took, where evidence of one was given.
        notes: What else a person must know about the figures.
        ended: "finished", "stopped" (Ctrl-C) or "cut" (it took too long).
    """

    command: tuple[str, ...]
    machine: Machine
    loader: LoaderFacts
    rates: tuple[Rate, ...] = ()
    stages: Stages | None = None
    stages_workers: int = 0
    flame: str = ""
    flame_note: str = ""
    consumed: Consumed | None = None
    notes: tuple[str, ...] = ()
    ended: str = "finished"
    seconds: float = 0.0
    hasten: str = ""
    created: str = ""
    schema: str = SCHEMA

    @property
    def measured(self) -> tuple[Rate, ...]:
        """The rates that were measured."""
        return tuple(rate for rate in self.rates if not rate.error)

    @property
    def best(self) -> Rate | None:
        """The least number of workers that gives, but for 3 %, the most."""
        most = max((rate.samples_per_s for rate in self.measured), default=0.0)
        return next((rate for rate in self.measured if rate.samples_per_s >= 0.97 * most), None)

    def rate_of(self, workers: int) -> Rate | None:
        """The measured rate with so many workers."""
        return next((rate for rate in self.measured if rate.workers == workers), None)

    def write(self, path: Path) -> None:
        """Write as JSON, whole or not at all.

        Raises:
            HastenError: The file cannot be written, or holds something else.
        """
        text = json.dumps(finite(dataclasses.asdict(self)), indent=1, allow_nan=False)
        files.write_own(path, text, "the figures", is_loader_bench)


is_loader_bench = files.json_of(SCHEMA)
