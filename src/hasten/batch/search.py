"""Find the largest batch size that fits a memory limit.

Attempts with growing batch sizes give peak memory and throughput. Needed memory is linear in the batch size once freed
memory is returned at once (lean attempts), so a line through two of them predicts the largest size, and a last attempt
verifies it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from hasten.batch.attempt import Attempt
from hasten.batch.noise import CriticalBatch
from hasten.batch.trouble import below_torch, what_holds_it
from hasten.errors import HastenError

_STEP = 4  # factor from one attempt's size to the next
_MOST = 6  # attempts before the verifying one
_GREW = 0.25  # growth of the peak, as a share of the first one, from which a line through two attempts is good enough
SPARE = 0.05  # share of the limit that stays free, since a prediction may be off by so much
_SATURATED = 0.95  # share of the best rate from which throughput counts as saturated


class Trials(Protocol):
    """Runs attempts of one training: `Attempts`, or a class that trains in this process.

    Attributes:
        limit: Bytes of memory that the training may use.
        on_gpu: Whether it trains on a GPU.
        attempts: The attempts so far.
        leans: Whether an attempt can have the C library return freed memory at once.
    """

    limit: int
    on_gpu: bool
    attempts: list[Attempt]
    leans: bool

    def run(self, size: int = 0, former: int = 0, lean: bool = False) -> Attempt:
        """Train some steps; see `Attempts.run`."""
        ...

    def own_size(self, first: Attempt, argument_value: int) -> tuple[int, int]:
        """Return the training's own batch size, and the number of samples in its dataset (0 if unknown)."""
        ...


@dataclass(frozen=True)
class MemoryLine:
    """Memory that a training needs by batch size: `fixed + per_sample * size`, in bytes.

    Freed memory that the C library keeps comes on top and is not linear: see `lean` in `Attempts.run`.
    """

    fixed: float
    per_sample: float

    def peak(self, size: int) -> float:
        """Return the predicted peak in bytes."""
        return self.fixed + self.per_sample * size

    def largest(self, limit: float) -> int:
        """Return the largest size whose predicted peak is within a limit; 0 if not even one sample fits."""
        if self.peak(1) > limit:
            return 0
        return int((limit - self.fixed) / self.per_sample) if self.per_sample > 0 else 1 << 40


def line_through(attempts: list[Attempt]) -> MemoryLine:
    """Return the line through the two largest sizes that ran, where the fixed part hides the growth least."""
    ran = sorted((attempt for attempt in attempts if attempt.outcome == "ok"), key=lambda attempt: attempt.size)
    small, large = ran[-2], ran[-1]
    slope = max(0.0, (large.peak - small.peak) / (large.size - small.size))
    return MemoryLine(large.peak - slope * large.size, slope)


@dataclass
class BatchSearchResult:
    """The result of a search.

    Attributes:
        own: The script's own batch size.
        limit: Bytes of memory that the training may use.
        samples: Number of samples in the training loader's dataset; 0 if unknown.
        line: Memory that the training needs, with freed memory returned at once.
        largest: The largest size that ran within the limit, with room to spare; the smallest that ran if none had.
        verified: The attempt with that size.
        bound: What limits it: "memory", "samples", "time" or "the script".
        saturated: The smallest size within 5 % of the best rate.
        attempts: All attempts, without the lean ones.
        critical: The gradient noise scale; None if it was not asked for.
    """

    own: int
    limit: int
    samples: int
    line: MemoryLine
    largest: int
    verified: Attempt
    bound: str
    saturated: int
    attempts: list[Attempt] = field(default_factory=list)
    critical: CriticalBatch | None = None

    @property
    def is_safe(self) -> bool:
        """Whether `largest` left room."""
        return _has_room(self.verified, self.limit)


def search(attempts: Trials, argument_value: int, say: Callable[[str], None]) -> BatchSearchResult:
    """Try growing batch sizes, predict the largest that fits, and verify it by an attempt.

    Args:
        attempts: Runs the attempts.
        argument_value: The training's own batch size, if it is an argument; 0: take the loader's.
        say: Receives a line for each attempt.

    Raises:
        HastenError: The script's batch size cannot be changed, or it does not train with its own batch size.
    """
    say("trying the training's own batch size")
    first = attempts.run()
    _check_first(first, attempts)
    attempts.on_gpu = first.device == "cuda"
    if attempts.on_gpu:
        attempts.limit = min(attempts.limit, first.device_bytes)
    own_size, samples = attempts.own_size(first, argument_value)
    first = attempts.attempts[0] = Attempt(**{**vars(first), "size": own_size})
    tried, most = [first], samples or 1 << 40
    size = own_size
    while len(tried) < _MOST and size < most:
        size = min(size * _STEP, most)
        if len(tried) > 1 and line_through(tried).peak(size) > attempts.limit * (1 - SPARE):
            break
        attempt = _run(attempts, size, own_size, say)
        if attempt.outcome != "ok":
            break
        tried.append(attempt)
        grew = tried[-1].peak - tried[0].peak > _GREW * tried[0].peak
        if grew and attempt.rate < tried[-2].rate / _SATURATED:
            break  # larger batches are no faster, and the line is known
    if len(tried) < 2:
        tried = _closer(attempts, first, tried, say)
    if attempts.leans:
        say(f"asking what batches {tried[0].size} and {tried[-1].size} need with memory given back at once")
    lean = [attempts.run(attempt.size, own_size, lean=True) for attempt in (tried[0], tried[-1])]
    line = line_through(lean if all(attempt.outcome == "ok" for attempt in lean) else tried)
    largest, bound = _largest(line, attempts.limit, most)
    verified, bound = _verified(attempts, tried, largest, own_size, bound, say)
    ran = [attempt for attempt in attempts.attempts if attempt.outcome == "ok"]
    best = max(attempt.rate for attempt in ran)
    saturated = min(attempt.size for attempt in ran if attempt.rate >= _SATURATED * best)
    return BatchSearchResult(
        own_size, attempts.limit, samples, line, verified.size, verified, bound, saturated, attempts.attempts
    )


def _run(attempts: Trials, size: int, own_size: int, say: Callable[[str], None]) -> Attempt:
    attempt = attempts.run(size, own_size)
    result = (
        f"{attempt.peak / 1e9:.2f} GB, {attempt.rate:,.0f} samples/s" if attempt.outcome == "ok" else attempt.outcome
    )
    say(f"batch {size}: {result}")
    return attempt


def _closer(attempts: Trials, first: Attempt, tried: list[Attempt], say: Callable[[str], None]) -> list[Attempt]:
    """Try twice, then half the own batch size, since four times did not run; a line needs two attempts.

    Raises:
        HastenError: Neither ran.
    """
    for size in (2 * first.size, first.size // 2):
        if size >= 1 and (attempt := _run(attempts, size, first.size, say)).outcome == "ok":
            return sorted([*tried, attempt], key=lambda attempt: attempt.size)
    raise HastenError(
        f"only batch {first.size} ran: nothing can be said of other sizes",
        "the training may depend on its batch size (`view(batch_size, ...)`, a state of that size)",
    )


def _largest(line: MemoryLine, limit: int, most: int) -> tuple[int, str]:
    """Return the largest size that the line predicts to fit, and what bounds it: "memory" or "samples"."""
    largest = line.largest(limit * (1 - SPARE))
    return (most, "samples") if largest >= most else (largest, "memory")


def _verified(
    attempts: Trials, tried: list[Attempt], largest: int, own_size: int, bound: str, say: Callable[[str], None]
) -> tuple[Attempt, str]:
    """Return an attempt that ran with room to spare, at the predicted size or below, and what bounds it.

    Falls back to the largest earlier attempt with room to spare, or the first of them.
    """
    limit = attempts.limit * (1 - SPARE)
    safe = [attempt for attempt in tried if attempt.peak <= limit] or tried[:1]
    for share in (1.0, 0.85, 0.7):
        size = int(share * largest)
        if size <= safe[-1].size:
            break
        say(f"verifying batch {size}")
        attempt = _run(attempts, size, own_size, say)
        if attempt.outcome == "ok" and _has_room(attempt, attempts.limit):
            return attempt, bound if share == 1.0 else "memory"
        if attempt.outcome in ("timeout", "failed"):
            return safe[-1], "time" if attempt.outcome == "timeout" else "the script"
    return safe[-1], bound


def _check_first(first: Attempt, attempts: Trials) -> None:
    """Raise if the training does not run with its own batch size."""
    if too_little := below_torch(first, attempts.limit, f"{attempts.limit / 1e6:.0f} MB"):
        raise too_little
    if first.outcome == "out of memory":
        message = (
            f"the training does not fit into {attempts.limit / 1e9:.2f} GB with its own batch size ({first.reason})"
        )
        raise HastenError(
            "\n".join([message, *what_holds_it(first)]),
            "allow more with --memory, or make the model or the script's batch size smaller",
        )
    if first.outcome != "ok":
        raise HastenError(f"the script did not train in a trial: {first.reason}", "hasten doctor shows why")


def _has_room(attempt: Attempt, limit: int) -> bool:
    """Return whether enough was free: half of what was to stay so, as the prediction may be slightly off."""
    return attempt.peak <= limit * (1 - SPARE / 2)
