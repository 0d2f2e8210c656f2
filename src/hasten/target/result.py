"""Result of a search for the shortest time to a goal, as plain data; written to `hasten-target.json`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten import files
from hasten.evidence.interval import middle_of
from hasten.evidence.plain import finite
from hasten.target.full_run import FullRun
from hasten.target.goal import Goal
from hasten.tuner.proof import Answer, Ratio
from hasten.tuner.report_paths import without_paths

SCHEMA = "hasten-target/1"
_ENOUGH = 3  # pairs of fresh seeds that a proof needs


@dataclass(frozen=True)
class SeedPair:
    """The unchanged script and the winner with the same seed, one that the search had not used.

    Attributes:
        seed: Offset added to the script's seeds.
        plain: Seconds until the unchanged script reached the goal; None: not within `plain_seconds`.
        plain_seconds: Seconds that it ran; it is stopped once it has reached the goal.
        winner: Seconds until the winner reached the goal.
        winner_seconds: Seconds of the winner's whole run.
    """

    seed: int
    plain: float | None
    plain_seconds: float
    winner: float
    winner_seconds: float

    @property
    def ratio(self) -> float:
        """How many times sooner the winner is; a lower bound if the unchanged script never reached the goal."""
        return (self.plain if self.plain is not None else self.plain_seconds) / self.winner


@dataclass(frozen=True)
class TargetResult:
    """Everything that a search measured.

    Attributes:
        goal: The quality to be reached.
        understood: Which of the script's numbers is taken as the quality, in words.
        example: A reported line with that number.
        runs: All runs, in order.
        winner: The run among `runs` that is offered; None if nothing better was found.
        command: The training's command line.
        offered: The winner's command line.
        plan: The winner's techniques.
        pairs: Runs of the unchanged script and the winner on fresh seeds.
        cost: Seconds of all runs together.
        has_length: Whether the script has an argument for its length.
        untried: What there was no time for, a sentence each.
        notes: Further remarks, a sentence each.
        interrupted: Whether Ctrl-C ended the search.
    """

    goal: Goal
    understood: str
    example: str
    runs: tuple[FullRun, ...]
    winner: FullRun | None
    command: tuple[str, ...]
    offered: tuple[str, ...]
    plan: dict[str, Any]
    pairs: tuple[SeedPair, ...]
    cost: float
    has_length: bool
    created: str = ""
    hasten: str = ""
    untried: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    schema: str = field(default=SCHEMA)

    @property
    def first(self) -> FullRun:
        """The unchanged script's run with its own seeds."""
        return self.runs[0]

    @property
    def ratio(self) -> Ratio | None:
        """How many times sooner the goal is reached on fresh seeds, with its interval; None without a pair."""
        return ratio_of(self.pairs)

    @property
    def proven(self) -> Answer:
        """Whether the winner reaches the goal sooner. With fewer than three pairs the answer is not known."""
        ratio = self.ratio
        if ratio is None or len(self.pairs) < _ENOUGH:
            return Answer.NOT_KNOWN
        return Answer.HOLDS if ratio.low > 1 else Answer.DOES_NOT if ratio.high < 1 else Answer.NOT_KNOWN

    @property
    def pays_after(self) -> int | None:
        """Number of trainings after which the search has paid for itself; None: never, or not measured."""
        if self.winner is None or not self.pairs:
            return None
        saved = self.first.seconds - sum(pair.winner_seconds for pair in self.pairs) / len(self.pairs)
        return math.ceil(self.cost / saved) if saved > 0 else None

    def to_json(self) -> str:
        """Return the text of `hasten-target.json`, with paths relative to the working directory."""
        data = dataclasses.asdict(without_paths(self))
        ratio = self.ratio
        data |= {
            "ratio": None if ratio is None else dataclasses.asdict(ratio),
            "proven": str(self.proven),
            "winner": None if self.winner is None else self.runs.index(self.winner),
            "pays_after_trainings": self.pays_after,
        }
        return json.dumps(finite(data), indent=1, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Write the result to a file atomically.

        Raises:
            HastenError: The file holds other content, or cannot be written.
        """
        files.write_own(path, self.to_json(), "the figures", is_target_result, "name another file with --out")


is_target_result = files.json_of(SCHEMA)


def ratio_of(pairs: Sequence[SeedPair]) -> Ratio | None:
    """Return how many times sooner the winners are: the geometric mean, with Student's t interval.

    None without a pair. With a single pair the interval is 0 to infinity.
    """
    if not pairs:
        return None
    logs = [math.log(pair.ratio) for pair in pairs]
    middle = middle_of(logs)
    if middle is None:
        return Ratio(math.exp(logs[0]), 0.0, math.inf)
    return Ratio(*map(math.exp, middle))
