"""Check that all ranks are about to do the same thing, before each collective of a script under `hasten run`.

A script may make rank-dependent decisions, so that one rank begins a pass while another averages gradients. Their
collectives would then mix, and hang or corrupt values. So before each, the ranks all-reduce one small message of fixed
size that says what comes next; a disagreement raises on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from hasten.errors import HastenError
from hasten.parallel.world import World

_MODULUS = 1 << 20  # squares of smaller numbers, summed over thousands of ranks, are exact in float64


class MeetingTopic(IntEnum):
    """Kind of collective that the ranks are about to run."""

    PASS = 1  # begin a pass through a loader
    ORDER = 2  # receive the next samples' order from rank 0
    MODEL = 3  # take over rank 0's weights
    BACKWARD = 4  # average gradients
    METRIC = 5  # take over rank 0's metric for a learning-rate schedule
    END = 6  # end the script successfully


_WORDS = {
    MeetingTopic.PASS: "began a pass through a DataLoader",
    MeetingTopic.ORDER: "asked a DataLoader for its next batches",
    MeetingTopic.MODEL: "called a model for the first time",
    MeetingTopic.BACKWARD: "had called backward",
    MeetingTopic.METRIC: "told a schedule its metric",
    MeetingTopic.END: "came to its end",
}


@dataclass(frozen=True)
class MeetingResult:
    """Result of a meeting.

    Attributes:
        total: Sum of the ranks' `share`.
        same: Whether all ranks gave the same `pattern`.
    """

    total: float
    same: bool


class Meeting:
    """Exchanges one small message of fixed size before each collective, so that ranks that disagree raise, not hang.

    Args:
        world: More than one rank; all of them make the same calls.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._meetings = 0

    def meet(self, topic: MeetingTopic, *, at: int = 0, share: float = 0.0, pattern: int = 0) -> MeetingResult:
        """Compare with the other ranks what this rank is about to do.

        Args:
            topic: What this rank is about to do.
            at: Progress of this rank, which must be equal on all ranks.
            share: Number to sum over the ranks.
            pattern: Number to compare; it may differ.

        Returns:
            The sum of `share`, and whether `pattern` was the same on all ranks.

        Raises:
            HastenError: The ranks are about to do different things; raised on all of them.
        """
        self._meetings += 1
        compared = [
            int(topic),
            at % _MODULUS,
            self._meetings % _MODULUS,
            pattern % _MODULUS,
            pattern // _MODULUS % _MODULUS,
        ]
        sums = [float(number) for number in compared] + [float(number**2) for number in compared] + [share]
        totals: list[float] = self.world.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
        # One sum serves as comparison: n numbers are equal if and only if n times the sum of their squares equals the
        # square of their sum (Cauchy-Schwarz).
        same = [self.world.size * totals[i + len(compared)] == totals[i] ** 2 for i in range(len(compared))]
        if not all(same[:3]):
            raise HastenError(
                f"The ranks have parted: rank {self.world.rank} {_WORDS[topic]} where another one did something else.",
                "Each rank sees its own share of a batch. Look for a decision that hangs on it, such as skipping a "
                "batch, or stopping, by the training loss; decide by what is the same on all ranks.",
                code=1,
            )
        return MeetingResult(totals[-1], all(same[3:]))
