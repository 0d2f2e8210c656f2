"""Result of a search for a batch size, for code to read and to print."""

from __future__ import annotations

from hasten.batch.attempt import Attempt
from hasten.batch.search import BatchSearchResult
from hasten.batch.words import lines, rate_factor, split


class BatchSizes:
    """The result of `Trainer.find_batch_size`; printing it shows the same lines as `hasten batch`.

    Attributes:
        found: The search's full result, with each attempt.
    """

    def __init__(self, found: BatchSearchResult) -> None:
        self.found = found

    @property
    def largest(self) -> int:
        """Largest safe batch size: it ran within the limit, with room to spare. The smallest that ran if none had."""
        return self.found.largest

    @property
    def saturated(self) -> int:
        """Smallest batch size whose throughput is within 5 % of the best."""
        return self.found.saturated

    @property
    def rates(self) -> dict[int, float]:
        """Samples per second, by batch size."""
        return {attempt.size: attempt.rate for attempt in self._ran}

    @property
    def peaks(self) -> dict[int, int]:
        """Peak memory in bytes, by batch size."""
        return {attempt.size: attempt.peak for attempt in self._ran}

    @property
    def memory(self) -> dict[str, int]:
        """Peak memory of the largest batch by part, in bytes: parameters, gradients, optimizer, activations, rest."""
        return split(self.found)

    @property
    def rate_factor(self) -> float:
        """Factor to multiply the learning rate by for `saturated`, by a rule of thumb."""
        return rate_factor(self.found)

    @property
    def _ran(self) -> list[Attempt]:
        return sorted(
            (attempt for attempt in self.found.attempts if attempt.outcome == "ok"), key=lambda attempt: attempt.size
        )

    def __str__(self) -> str:
        return "\n".join(lines(self.found))
