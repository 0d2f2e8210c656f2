"""How many threads the CPU kernels use."""

from __future__ import annotations

from typing import Any

from hasten.evidence import Evidence, Machine
from hasten.plan import Setting
from hasten.techniques.base import Choices, Effect, Refusal, Resource
from hasten.techniques.switches import ProcessWide


class CpuThreads(ProcessWide):
    """Set the number of intra-op threads (OMP_NUM_THREADS and torch's own).

    Small steps lose more in waking threads than they gain; workers want cores of their own. Sums are split
    otherwise, hence `rounding`. Under the Trainer, whose process runs already, torch's own number alone is set.
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
