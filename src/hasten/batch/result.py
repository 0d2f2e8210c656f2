"""The result of a search for a batch size, for code to read and for a person to print."""

from __future__ import annotations

from hasten.batch.attempt import Attempt
from hasten.batch.search import BatchSearchResult
from hasten.batch.words import lines, rate_factor, split


class BatchSizes:
    """The result of `Trainer.find_batch_size`; `print` shows it as `hasten batch` does.

    Attributes:
        found: The search, with each attempt.
    """

    def __init__(self, found: BatchSearchResult) -> None:
        self.found = found

    @property
    def largest(self) -> int:
        """The largest batch size that is safe: it ran within the limit, with room to spare."""
        return self.found.largest

    @property
    def saturated(self) -> int:
        """The smallest batch size whose throughput is within 5 % of the best."""
        return self.found.saturated

    @property
    def rates(self) -> dict[int, float]:
        """Samples a second, by batch size."""
        return {one.size: one.rate for one in self._ran}

    @property
    def peaks(self) -> dict[int, int]:
        """Greatest memory in bytes, by batch size."""
        return {one.size: one.peak for one in self._ran}

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that the largest batch's peak goes to: parameters, gradients, optimizer, activations, the rest."""
        return split(self.found)

    @property
    def rate_factor(self) -> float:
        """Factor of the learning rate for `saturated`, by a rule of thumb."""
        return rate_factor(self.found)

    @property
    def _ran(self) -> list[Attempt]:
        return sorted((one for one in self.found.attempts if one.outcome == "ok"), key=lambda one: one.size)

    def __str__(self) -> str:
        return "\n".join(lines(self.found))
