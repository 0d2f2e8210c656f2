"""Determine how much memory a training may use: the limit that the user names, or the one in force."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field

from hasten.batch.attempt import free_bytes
from hasten.batch.search import SPARE
from hasten.batch.words import gigabytes

_ALL = 1 << 50  # bytes: more than any GPU has, whose own size bounds it then
_OF_THE_PROCESS = {"RLIMIT_AS": "ulimit -v", "RLIMIT_DATA": "ulimit -d"}


@dataclass(frozen=True)
class Limit:
    """Memory that a training may use, on the device that it trains on.

    Attributes:
        size: Limit in bytes.
        words: The limit, as shown to the user.
        bounds: Limits that each trial's process sets for itself, see `hasten.batch.attempt.Attempts`.
    """

    size: int
    words: str
    bounds: dict[str, int] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """Bytes that a trial may use: 5 % less than the limit, so that a long run has some to spare."""
        return round(self.size * (1 - SPARE))


def limit_of(size: int, on_gpu: bool) -> Limit:
    """Return the limit that the user named."""
    return Limit(size, gigabytes(size), {"gpu": round(size * (1 - SPARE))} if on_gpu else {})


def limit_in_force(on_gpu: bool) -> Limit:
    """Return the limit in force: of the GPU, the process (`ulimit`), its cgroup or the machine."""
    if on_gpu:
        return Limit(_ALL, "the GPU's memory")
    free, words, bounds = free_bytes(), "", {}
    for name, command in _OF_THE_PROCESS.items():
        soft = resource.getrlimit(getattr(resource, name))[0]
        if soft != resource.RLIM_INFINITY:
            bounds[name] = round(soft * (1 - SPARE))
            if soft < free:
                free, words = soft, f"{gigabytes(soft)} ({command})"
    return Limit(free, words or f"{gigabytes(free)} (nine tenths of what is free here)", bounds)
