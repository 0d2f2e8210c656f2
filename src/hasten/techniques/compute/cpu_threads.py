"""How many threads the CPU kernels use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hasten.evidence import Evidence, Machine
from hasten.plan import Setting
from hasten.techniques.base import Choices, Effect, Refusal, Resource
from hasten.techniques.compute.compile import KERNEL_THREADS
from hasten.techniques.switches import ProcessWide

if TYPE_CHECKING:
    from torch.nn import Module


class CpuThreads(ProcessWide):
    """Set the number of intra-op threads (OMP_NUM_THREADS and torch's own).

    Small steps lose more in waking threads than they gain; workers want cores of their own. Sums are split
    otherwise, hence `rounding`. Under the Trainer, whose process runs already, torch's own number alone is set; where a
    script calls `torch.set_num_threads` itself, it is set once more before the model's first forward.
    """

    name = "cpu_threads"
    effect = Effect.ROUNDING
    relieves = Resource.COMPUTE
    sources = ("PyTorch performance tuning guide, CPU",)
    values = int

    @classmethod
    def useless(cls, setting: Setting, machine: Machine) -> str:
        """More threads than cores wait for each other."""
        if isinstance(setting, int) and setting > machine.cores:
            return f"{setting} threads on {machine.cores} cores would wait for each other"
        return ""

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Other numbers than the present one, up to the cores there are."""
        cores, now = evidence.machine.cores, evidence.flags.threads
        if evidence.models and all(model.device == "cuda" for model in evidence.models):
            return Refusal("the training computes on the GPU")
        counts: list[Any] = [n for n in dict.fromkeys((cores, max(1, cores // 2), 1)) if n != now]
        if not counts:
            return Refusal(f"{now} threads on {cores} cores already")
        return Choices(tuple(counts), f"{now} threads on {cores} cores")

    def environment(self, env: dict[str, str]) -> None:
        """Before OpenMP starts."""
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(self.setting)
        self.did("process")

    def process(self) -> None:
        """In a process that began with another number, as the Trainer's does: set torch's own."""
        import torch

        if torch.get_num_threads() != self.setting:
            self._switches.set(torch.get_num_threads, torch.set_num_threads, int(str(self.setting)))
        self.did("process")

    def model(self, model: Module, args: tuple[Any, ...]) -> None:
        """Set it again where the script has called `torch.set_num_threads` by its first forward."""
        from torch.utils.data import get_worker_info

        # A loader's worker that computes keeps its one thread, and so does a check, which says so by this variable.
        if self.active and get_worker_info() is None and KERNEL_THREADS not in os.environ:
            self.process()
