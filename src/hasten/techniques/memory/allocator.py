"""The technique `allocator`: choose the C allocator, or make glibc's keep memory instead of releasing it at each step.

Environment variables do it for a process that `hasten run` starts; `glibc.Glibc` does it in a process that runs
already.
"""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache

from hasten.evidence import Evidence, Machine
from hasten.plan import Setting
from hasten.techniques.base import Choices, Effect, Liveness, Refusal, Resource, Technique
from hasten.techniques.memory.glibc import KEPT, Glibc

TUNABLES = ":".join(f"glibc.malloc.{name}={value}" for name, value in KEPT.items())
"""For GLIBC_TUNABLES: freed memory is kept for the next tensor."""
# Blocks above 1 MiB are returned to the kernel at once. By default glibc keeps freed blocks below 32 MiB in its heap,
# which they fragment: examples/tabular_mlp.py takes 1243 MB at batch 13312, but 606 MB at 16384, whose blocks are
# larger.
LEAN = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
_LIBRARIES = {"jemalloc": "libjemalloc.so", "tcmalloc": "libtcmalloc"}


class Allocator(Technique):
    """Choose the allocator of CPU memory.

    "glibc" sets glibc's own tunables so that the memory of freed tensors is reused; "jemalloc" and "tcmalloc" replace
    glibc's allocator where they are installed. "lean" is for little memory: glibc returns freed blocks above 1 MiB to
    the kernel at once, which costs page faults at each step. `hasten run` sets them in the environment, before the
    process starts. The Trainer and `hasten.setup` configure glibc in the running process; "jemalloc", "tcmalloc" and
    "lean" need `hasten run` there too, or the variables set by whoever starts Python.
    """

    name = "allocator"
    effect = Effect.EXACT
    relieves = Resource.MEMORY
    sources = ("PyTorch performance tuning guide, CPU", "glibc manual, Memory Allocation Tunables")
    values = ("glibc", "jemalloc", "tcmalloc", "lean")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._glibc: Glibc | None = None

    @classmethod
    def liveness_of(cls, setting: Setting) -> Liveness:
        """Return STEP for "glibc", which can be configured at any time; no other allocator can replace it then."""
        return Liveness.STEP if setting == "glibc" else Liveness.PROCESS

    @classmethod
    def useless(cls, setting: Setting, machine: Machine) -> str:
        """Refuse a library that is not installed, and glibc's settings on a system without glibc."""
        if setting in ("glibc", "lean"):
            return "" if platform.libc_ver()[0] == "glibc" else "this system's C library is not glibc"
        return "" if library(str(setting)) else f"{setting} is not installed"

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose the allocators that are installed, except "lean", for scripts that train on the CPU."""
        if all(model.device == "cuda" for model in evidence.models) and evidence.models:
            return Refusal("tensors live on the GPU, which has an allocator of its own")
        if "LD_PRELOAD" in os.environ or "GLIBC_TUNABLES" in os.environ:
            return Refusal("the environment chooses an allocator already (LD_PRELOAD or GLIBC_TUNABLES)")
        here: tuple[Setting, ...] = tuple(
            name for name in cls.values if name != "lean" and not cls.useless(name, evidence.machine)
        )
        if not here:
            return Refusal("neither glibc nor jemalloc nor tcmalloc is on this system")
        return Choices(here, "large tensors are given back to the kernel and faulted in again at each step")

    def environment(self, env: dict[str, str]) -> None:
        """Set the tunables, or load the library."""
        if self.setting == "glibc":
            env["GLIBC_TUNABLES"] = ":".join(filter(None, (env.get("GLIBC_TUNABLES"), TUNABLES)))
        elif self.setting == "lean":
            env.update(LEAN)
        elif path := library(str(self.setting)):
            env["LD_PRELOAD"] = ":".join(filter(None, (path, env.get("LD_PRELOAD"))))
        else:
            return
        self.did("process")

    @classmethod
    def too_late(cls, setting: Setting) -> str:
        """Return why a setting cannot be applied in a process that runs already; "" if it can."""
        if cls.liveness_of(setting) is Liveness.PROCESS:
            return f'"{setting}" is chosen when a process starts: use `hasten run`'
        return ""

    def process(self) -> None:
        """Configure glibc now, if the process was started without the tunables (`python train.py`)."""
        if self.setting == "glibc" and TUNABLES not in os.environ.get("GLIBC_TUNABLES", ""):
            self._keep()

    def restore(self) -> None:
        """Make glibc release memory as it does by default."""
        if self._glibc is not None:
            self._glibc.give_back()

    def on(self) -> None:
        """Make glibc keep memory from here on."""
        super().on()
        self._keep()

    def off(self) -> None:
        """Make glibc release memory as it does by default."""
        super().off()
        self.restore()

    def _keep(self) -> None:
        if self._glibc is None:
            self._glibc = Glibc()
        self._glibc.keep()
        self.did("process")


def keeping(evidence: Evidence) -> str:
    """Return a phrase on how to make glibc keep memory, for advice that makes a CPU allocate more; "" if it is no use.

    With it, casts to bfloat16 saved 34 % of a step of 2.2 ms (batch 32, 64 -> 1024 -> 1024 -> 10). Without it, glibc
    released their 8 MiB at each step, and the step took 60 % longer than in float32.
    """
    around, choices = evidence.surroundings, Allocator.settings(evidence)
    if (around is not None and around.preload) or isinstance(choices, Refusal) or "glibc" not in choices.settings:
        return ""
    return f", with GLIBC_TUNABLES={TUNABLES} set, which keeps the memory of its casts"


@cache
def library(name: str) -> str:
    """Return the path of an allocator's shared library, as the dynamic linker knows it; "" if it is not installed."""
    try:
        listing = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""
    for line in listing.splitlines():
        soname, _, path = line.strip().partition(" => ")
        if soname.startswith(_LIBRARIES[name]):
            return path
    return ""
