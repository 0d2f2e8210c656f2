"""How quiet the machine was while it measured: what the hypervisor and other processes took."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

import psutil

from hasten.tuner.found import Found
from hasten.tuner.proof import MachineNoise


@dataclass(frozen=True)
class _Reading:
    total: float
    busy: float
    stolen: float | None
    ours: float


class Quiet:
    """Reads CPU times when made, and again when asked."""

    def __init__(self) -> None:
        self._before = _read()

    def noise(self, found: Found) -> MachineNoise:
        """What was seen since."""
        before, now = self._before, _read()
        total = now.total - before.total
        if total <= 0:
            return MachineNoise(None, None, found.course.posterior.noise)
        stolen = (now.stolen - before.stolen) / total if now.stolen is not None and before.stolen is not None else None
        others = (now.busy - before.busy - (now.ours - before.ours)) / total
        return MachineNoise(stolen, max(0.0, others), found.course.posterior.noise if found.blocks else None)


def _read() -> _Reading:
    times = psutil.cpu_times()
    stolen = getattr(times, "steal", None)
    # Linux counts guests' time in user's as well.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    busy = total - times.idle - getattr(times, "iowait", 0.0) - (stolen or 0.0)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    mine = os.times()
    return _Reading(total, busy, stolen, mine.user + mine.system + children.ru_utime + children.ru_stime)
