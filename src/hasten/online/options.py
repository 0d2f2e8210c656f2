"""Options of a process that is tuned. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hasten.online.prior import Prior
from hasten.plan import Setting
from hasten.techniques.base import toml_value

FILLS = ("sample_cache",)
"""Techniques that cost extra work in their first pass."""
FILLING = "first pass: a cache fills"
"""Why a block of such a pass does not count."""


@dataclass(frozen=True)
class Candidate:
    """One setting of one technique that may help.

    Attributes:
        name: Name of the technique.
        setting: The setting.
        mean: Prior mean of its effect: change of log(seconds per step), negative is faster.
        spread: Prior standard deviation of its effect.
        label: Short name for reports; "" to use technique and setting.
        known: Mean and standard deviation beside an earlier tune's plan. While blocks agree, it is not measured again.
        validation: Prior (mean, standard deviation) of its effect on validation; None if the same as on a step.
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
        """Name that identifies technique and setting, the same in every tune."""
        return f"{self.name}={toml_value(self.setting)}"

    @property
    def display_name(self) -> str:
        """Name for reports: the label, or technique and setting."""
        return self.label or self.key


@dataclass(frozen=True)
class OnlineOptions:
    """How a training is tuned while it runs.

    Attributes:
        candidates: Settings that may be switched on.
        results: File for blocks and events, one JSON object per line.
        search_until: Moment (`time.monotonic`) at which the search ends and the claim begins.
        claim_until: Moment at which the process ends. Not later than `search_until` means: search only, no claim.
        block_seconds: Least measured seconds of a block.
        seed: Seed of the search's random draws; another seed measures in another order.
        careful: Add candidates that never ran before one at a time, because an earlier process crashed.
        earlier_blocks: Blocks of earlier processes: (indices of candidates that were on, seconds per step, disturbed).
        plan: Indices of the candidates to measure the claim for; None for those that the search chooses.
        total_steps: Steps of the full training, over which compiling must pay for itself.
        validation_share: Share of an epoch's time that validation takes, from 0 to 1.
        prior: An earlier tune's estimate of the candidates and pairs.
        early_ends: How often a pass of the script may be cut short, so that its validation is seen.
        dropped: Indices of candidates that are off for good.
        settled: Indices that an earlier process settled on, so that the search is over; None if it is not.
        compiling: Seconds that compiling took in an earlier process; None if it was not tried.
        last_step: Number of steps after which an earlier process trained no more but went on for long: the process
            ends there. 0: it runs to its end.
    """

    candidates: tuple[Candidate, ...]
    results: str
    search_until: float
    claim_until: float
    block_seconds: float = 0.5
    seed: int = 0
    careful: bool = False
    earlier_blocks: tuple[tuple[tuple[int, ...], float, bool], ...] = ()
    plan: tuple[int, ...] | None = None
    total_steps: int = 10_000
    validation_share: float = 0.0
    dropped: tuple[int, ...] = ()
    early_ends: int = 0
    prior: Prior | None = None
    settled: tuple[int, ...] | None = None
    compiling: float | None = None
    last_step: int = 0

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> OnlineOptions:
        """Build the options from `dataclasses.asdict`'s result after a round trip through JSON and `tuples`."""
        candidates = tuple(Candidate(**candidate) for candidate in data["candidates"])
        prior = Prior(**data["prior"]) if data["prior"] is not None else None
        return cls(**{**data, "candidates": candidates, "prior": prior})


@dataclass(frozen=True)
class AutoOptions:
    """How a user's own run is tuned while it trains (`--auto`), or repeated (`--replay`).

    Attributes:
        plan: File to which the plan is written.
        schedule: File to which each switch is written, one JSON object per line; with `replay`, the file to read.
        epochs: Epochs of the whole training, if the command line names them.
        replay: Switch as an earlier run did, without a search.
        seed: Seed of the search's random draws.
        plan_shown_as: The plan's file as the user named it.
        least_seconds: A training with less time left than this is left alone.
        most_seconds: Most seconds of the search.
        look_every: Least number of steps between two looks at whether the chosen set still helps.
        steps: Steps of the whole training, if known; `epochs` is not needed then.
        root: Process id that `hasten run` becomes by exec; 0 if it does not matter which process is switched.
    """

    plan: str
    schedule: str
    epochs: int | None = None
    replay: bool = False
    seed: int = 0
    plan_shown_as: str = ""
    least_seconds: float = 60.0
    most_seconds: float = 60.0
    look_every: int = 1000
    steps: int | None = None
    root: int = 0
