"""Options of the process that is tuned. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hasten.online.prior import Prior
from hasten.plan import Setting
from hasten.techniques.base import toml_value

FILLS = ("sample_cache",)
"""Techniques that do more work than none in their first pass."""
FILLING = "first pass: a cache fills"
"""Why a block of such a pass does not count."""


@dataclass(frozen=True)
class Candidate:
    """One setting of one technique that may help.

    Attributes:
        name: The technique's.
        setting: The setting.
        mean: What is expected of it before it was measured: change of log(seconds per step), negative is faster.
        spread: Standard deviation of that expectation.
        label: How the course of the search calls it.
        known: Mean and deviation of it beside an earlier tune's plan: while blocks agree, it need not be asked.
        validation: What is expected of validation's time: mean and deviation; None: the same as of a step.
    """

    name: str
    setting: Setting
    mean: float = -0.05
    spread: float = 0.2
    label: str = ""
    known: tuple[float, float] | None = None
    validation: tuple[float, float] | None = None

    @property
    def key(self) -> str:
        """Name of the setting among all settings and techniques, the same in every tune."""
        return f"{self.name}={toml_value(self.setting)}"

    @property
    def called(self) -> str:
        """Its name in words: with the setting, unless it has a label."""
        return self.label or self.key


@dataclass(frozen=True)
class OnlineOptions:
    """How a training is tuned while it runs.

    Attributes:
        candidates: What may be switched on.
        results: File to which blocks and what else happens are written, a JSON object a line.
        search_until: Moment (`time.monotonic`) at which the search ends and the claim begins.
        claim_until: Moment at which the process ends; not after `search_until`: no claim, the search is all.
        block_seconds: Measured seconds of a block at the least.
        seed: Of the draws of the search; another one asks in another order.
        careful: Add what never ran before one by one: a process before this one crashed.
        former: Blocks that earlier processes measured, as (indices of what was on, seconds a step, disturbed).
        plan: Indices of the candidates to claim for; None: those that the search chooses.
        total_steps: Steps of the full training, against which compiling is weighed.
        validation_share: Share of an epoch's time that validation takes, from 0 to 1.
        prior: What an earlier tune knew of the candidates and of pairs of them.
        early_ends: How often a pass of the script may end before its length, so that its validation is seen.
        out: Indices of candidates that are off for good.
        settled: Indices of what an earlier process settled on: the search is over; None: it is not.
        compiling: Seconds that compiling took in an earlier process; None where it was not tried.
        last_step: Steps behind which an earlier process trained no more, and did something else for long: the process
            ends there; 0: it goes on to its end.
    """

    candidates: tuple[Candidate, ...]
    results: str
    search_until: float
    claim_until: float
    block_seconds: float = 0.5
    seed: int = 0
    careful: bool = False
    former: tuple[tuple[tuple[int, ...], float, bool], ...] = ()
    plan: tuple[int, ...] | None = None
    total_steps: int = 10_000
    validation_share: float = 0.0
    out: tuple[int, ...] = ()
    early_ends: int = 0
    prior: Prior | None = None
    settled: tuple[int, ...] | None = None
    compiling: float | None = None
    last_step: int = 0

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> OnlineOptions:
        """Read what `dataclasses.asdict` gave, by way of JSON and `tuples`."""
        candidates = tuple(Candidate(**one) for one in data["candidates"])
        prior = Prior(**data["prior"]) if data["prior"] is not None else None
        return cls(**{**data, "candidates": candidates, "prior": prior})


@dataclass(frozen=True)
class AutoOptions:
    """How a person's own run is tuned while it goes on, or how such a run is repeated.

    Attributes:
        plan: File to which the plan is written.
        schedule: File to which each switch is written, a JSON object a line; with `replay`, the file that is read.
        epochs: Of the whole training, where the command line names them.
        replay: Switch as an earlier run did, and search nothing.
        seed: Of the draws of the search.
        shown: The plan's file, as the person named it.
        least_seconds: Training that takes no longer than this from now on is left alone.
        most_seconds: Seconds of the search at the most.
        look_every: Steps from one look at what was chosen to the next, at the least.
        steps: Of the whole training, where that is known; `epochs` is not needed then.
        root: Process id of the one that `hasten run` becomes; 0: it does not matter which process is switched.
    """

    plan: str
    schedule: str
    epochs: int | None = None
    replay: bool = False
    seed: int = 0
    shown: str = ""
    least_seconds: float = 60.0
    most_seconds: float = 60.0
    look_every: int = 1000
    steps: int | None = None
    root: int = 0
