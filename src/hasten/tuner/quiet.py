"""How quiet the machine was while it measured: what the hypervisor and other processes took."""

from __future__ import annotations

from hasten.tuner.found import Found
from hasten.tuner.proof import MachineNoise
from hasten.warm.taken import Reading


class Quiet:
    """Reads CPU times when made, and again when asked."""

    def __init__(self) -> None:
        self._before = Reading()

    def noise(self, found: Found) -> MachineNoise:
        """What was seen since."""
        taken = self._before.taken()
        return MachineNoise(taken.steal, taken.others, found.course.posterior.noise if found.blocks else None)
