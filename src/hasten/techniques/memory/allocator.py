"""The C allocator told to keep memory instead of giving it back at every step."""

from __future__ import annotations

import math
import os
import platform
import subprocess
from bisect import bisect_left, bisect_right
from functools import cache
from itertools import pairwise

from hasten.evidence import Evidence, Finding, HowKnown, Machine, MemoryPoint
from hasten.evidence.waiting import in_ms, mean_during, stretch
from hasten.evidence.weigh import is_sure, on_gpu, share_of, switched, timed
from hasten.plan import Setting
from hasten.techniques.base import Choices, Effect, Liveness, Refusal, Resource, Technique, toml_value
from hasten.techniques.memory.glibc import KEPT, Glibc

TUNABLES = ":".join(f"glibc.malloc.{name}={value}" for name, value in KEPT.items())
"""For GLIBC_TUNABLES: freed memory is kept for the next tensor."""
_MANY = 500  # pages a step: 2 MiB
_CERTAIN = 0.05  # share of the step from which on it shows: 6 % by such counts was 0 to 3 % when tried
_PAGE = 2e-6  # seconds a page fault costs: 1.5 to 2.7 us in the virtual machine this was measured in
_LIBRARIES = {"jemalloc": "libjemalloc.so", "tcmalloc": "libtcmalloc"}


class Allocator(Technique):
    """Choose the allocator of CPU memory.

    "glibc" sets glibc's own tunables so that freed tensors' memory is used again; "jemalloc" and "tcmalloc" are
    loaded in glibc's place where they are installed. Set in the environment, before the process starts: under the
    Trainer it needs `hasten run`, or the variables set by whoever starts Python.
    """

    name = "allocator"
    finds = "allocator"
    effect = Effect.EXACT
    relieves = Resource.MEMORY
    sources = ("PyTorch performance tuning guide, CPU", "glibc manual, Memory Allocation Tunables")
    values = ("glibc", "jemalloc", "tcmalloc")
    tried = "glibc"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._glibc: Glibc | None = None

    @classmethod
    def liveness_of(cls, setting: Setting) -> Liveness:
        """glibc can be told while it runs; no other allocator can take its place then."""
        return Liveness.STEP if setting == "glibc" else Liveness.PROCESS

    @classmethod
    def useless(cls, setting: Setting, machine: Machine) -> str:
        """The library must be there."""
        if setting == "glibc":
            return "" if platform.libc_ver()[0] == "glibc" else "this system's C library is not glibc"
        return "" if library(str(setting)) else f"{setting} is not installed"

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """What is installed here."""
        if all(model.device == "cuda" for model in evidence.models) and evidence.models:
            return Refusal("tensors live on the GPU, which has an allocator of its own")
        if "LD_PRELOAD" in os.environ or "GLIBC_TUNABLES" in os.environ:
            return Refusal("the environment chooses an allocator already (LD_PRELOAD or GLIBC_TUNABLES)")
        here: tuple[Setting, ...] = tuple(name for name in cls.values if not cls.useless(name, evidence.machine))
        if not here:
            return Refusal("neither glibc nor jemalloc nor tcmalloc is on this system")
        return Choices(here, "large tensors are given back to the kernel and faulted in again at each step")

    @classmethod
    def finding(cls, evidence: Evidence) -> Finding | None:
        """Memory that is given back to the kernel at each step and faulted in again.

        Rests on the page faults and the kernel's CPU time between steps of one pass behind the warm-up, shared out
        among the cores that the training used (PyTorch's tuning guide, CPU; glibc manual). Validation has faults of
        its own, and where workers are forked, all memory is faulted in once more. Where glibc was told to keep memory
        and not to, in turn, in the run itself: on what that showed.
        """
        points = [one for one in evidence.memory if one.faults is not None and one.system is not None]
        stretches = _undivided(evidence, points[len(points) // 3 :])
        around = evidence.surroundings
        if on_gpu(evidence) or not stretches or (around is not None and around.preload):
            return None
        faults, seconds, grown = _per_step(stretches)
        # Pages of memory that only grows are no fault of the allocator.
        if (again := faults - max(0.0, grown)) < _MANY:
            return None
        here = next((name for name in ("glibc", "jemalloc", "tcmalloc") if not cls.useless(name, evidence.machine)), "")
        # All of the training's threads fault, each on its own core.
        cores = max(1.0, (mean_during(evidence, evidence.use.main) or 1.0) if evidence.use is not None else 1.0)
        worth = share_of(evidence, min(seconds, again * _PAGE) / cores * stretch(evidence))
        if worth < _CERTAIN and not is_sure(evidence, cls.finds):
            return None
        worth, how_known, live = switched(evidence, cls.finds, worth, HowKnown.ESTIMATED)
        return timed(
            cls.finds,
            f"memory is given back to the kernel and faulted in again, {again * 4096 / 2**20:.0f} MiB a step, which "
            f"takes {in_ms(seconds)} of the kernel's CPU time",
            f"start the training with `hasten run`, or with GLIBC_TUNABLES={TUNABLES}",
            worth,
            how_known,
            details=(
                *live,
                "it may happen in one run of a script and not in the next: the top of the heap decides",
            ),
            technique=cls.name,
            setting=toml_value(here or "glibc"),
            sources=cls.sources,
        )

    def environment(self, env: dict[str, str]) -> None:
        """Set the tunables, or load the library."""
        if self.setting == "glibc":
            env["GLIBC_TUNABLES"] = ":".join(filter(None, (env.get("GLIBC_TUNABLES"), TUNABLES)))
        elif path := library(str(self.setting)):
            env["LD_PRELOAD"] = ":".join(filter(None, (path, env.get("LD_PRELOAD"))))
        else:
            return
        self.did("process")

    def on(self) -> None:
        """Have glibc keep memory from here on."""
        super().on()
        if self._glibc is None:
            self._glibc = Glibc()
        self._glibc.keep()
        self.did("process")

    def off(self) -> None:
        """Have glibc give memory back as it would, untold."""
        super().off()
        if self._glibc is not None:
            self._glibc.give_back()


def keeping(evidence: Evidence) -> str:
    """How to have memory kept, for advice that makes a CPU allocate more; "" where glibc does not allocate it.

    Casts to bfloat16 saved 34 % of a step of 2.2 ms (batch 32, 64 -> 1024 -> 1024 -> 10) with it; without, glibc gave
    their 8 MiB back at each step, and the step took 60 % longer than in float32.
    """
    around, choices = evidence.surroundings, Allocator.settings(evidence)
    if (around is not None and around.preload) or isinstance(choices, Refusal) or "glibc" not in choices.settings:
        return ""
    return f", with GLIBC_TUNABLES={TUNABLES} set, which keeps the memory of its casts"


def _undivided(evidence: Evidence, points: list[MemoryPoint]) -> list[tuple[MemoryPoint, MemoryPoint]]:
    """Points that follow each other with no pass through a loader beginning or ending between them."""
    numbers = [evidence.number(index) for index in range(len(evidence.step_start))]

    def at(point: MemoryPoint) -> float:
        index = bisect_left(numbers, point.step)
        return evidence.step_start[index] if index < len(numbers) else math.inf

    ends = sorted(moment for over in evidence.passes for moment in (over.start, over.first, over.end))
    return [
        (before, after)
        for before, after in pairwise(points)
        if after.step > before.step and bisect_right(ends, at(before)) == bisect_right(ends, at(after))
    ]


def _per_step(stretches: list[tuple[MemoryPoint, MemoryPoint]]) -> tuple[float, float, float]:
    """Page faults, seconds of the kernel's CPU, and pages that memory grew by, per step of these stretches."""
    steps = sum(after.step - before.step for before, after in stretches)
    faults = sum((after.faults or 0) - (before.faults or 0) for before, after in stretches)
    seconds = sum((after.system or 0.0) - (before.system or 0.0) for before, after in stretches)
    return faults / steps, seconds / steps, sum(after.rss - before.rss for before, after in stretches) / 4096 / steps


@cache
def library(name: str) -> str:
    """Path of an allocator's shared library as the dynamic linker knows it; "" when it is not installed."""
    try:
        listing = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""
    for line in listing.splitlines():
        found, _, path = line.strip().partition(" => ")
        if found.startswith(_LIBRARIES[name]):
            return path
    return ""
