"""Where the ranks of a carried script meet: each says what it is about to do, before they do it together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from hasten.errors import HastenError
from hasten.parallel.world import World

_MODULUS = 1 << 20  # squares of smaller numbers, added up over thousands of ranks, are exact in float64


class About(IntEnum):
    """What the ranks are about to do together."""

    PASS = 1  # begin a pass through a loader
    ORDER = 2  # hear from rank 0 which samples come next
    MODEL = 3  # take rank 0's weights
    BACKWARD = 4  # average gradients
    METRIC = 5  # take rank 0's metric for a schedule
    END = 6  # end, in good order


_WORDS = {
    About.PASS: "began a pass through a DataLoader",
    About.ORDER: "asked a DataLoader for its next batches",
    About.MODEL: "called a model for the first time",
    About.BACKWARD: "had called backward",
    About.METRIC: "told a schedule its metric",
    About.END: "came to its end",
}


@dataclass(frozen=True)
class Met:
    """What the ranks have told each other.

    Attributes:
        total: The sum of their `share`.
        same: Whether they all told the same `pattern`.
    """

    total: float
    same: bool


class Meeting:
    """Ranks meet in one small message of fixed size: those that do different things notice, instead of hanging.

    Args:
        world: Of more than one rank; all of them make the same calls.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._met = 0

    def meet(self, about: About, *, at: int = 0, share: float = 0.0, pattern: int = 0) -> Met:
        """Tell the others what comes now, and hear that they are about to do the same.

        Args:
            about: What this rank is about to do.
            at: How far this rank is, the same number on all.
            share: A number that is added up over the ranks.
            pattern: A number that may differ.

        Raises:
            HastenError: The ranks are about to do different things; raised on all of them.
        """
        self._met += 1
        whole = [int(about), at % _MODULUS, self._met % _MODULUS, pattern % _MODULUS, pattern // _MODULUS % _MODULUS]
        sums = [float(number) for number in whole] + [float(number**2) for number in whole] + [share]
        heard: list[float] = self.world.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
        # n numbers are equal if, and only if, n times the sum of their squares is the square of their sum.
        same = [self.world.size * heard[i + len(whole)] == heard[i] ** 2 for i in range(len(whole))]
        if not all(same[:3]):
            raise HastenError(
                f"The ranks have parted: rank {self.world.rank} {_WORDS[about]} where another one did something else.",
                "Each rank sees its own share of a batch. Look for a decision that hangs on it, such as skipping a "
                "batch, or stopping, by the training loss; decide by what is the same on all ranks.",
                code=1,
            )
        return Met(heard[-1], all(same[3:]))
