"""How many threads the CPU kernels use."""

from __future__ import annotations

from typing import Any

from hasten.evidence import Evidence, Finding, Machine, Severity
from hasten.evidence.figures import percent
from hasten.evidence.waiting import mean_during, saturated
from hasten.evidence.weigh import COMPUTE, on_gpu, seconds_of, share_of
from hasten.plan import Setting
from hasten.techniques.base import Choices, Effect, Refusal, Resource
from hasten.techniques.switches import ProcessWide


class CpuThreads(ProcessWide):
    """Set the number of intra-op threads (OMP_NUM_THREADS and torch's own).

    Small steps lose more in waking threads than they gain; workers want cores of their own. Sums are split
    otherwise, hence `rounding`. Under the Trainer, whose process runs already, torch's own number alone is set.
    """

    name = "cpu_threads"
    finds = "threads_oversubscribed"
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

    @classmethod
    def finding(cls, evidence: Evidence) -> Finding | None:
        """More threads that compute than there are cores, and cores that are all busy.

        Rests on the threads of all training processes, the cores that loader workers keep busy, and the CPU use that
        was measured; what fewer threads bring must be tried (PyTorch's tuning guide, CPU).
        """
        around, use, cores = evidence.surroundings, evidence.use, evidence.machine.cores
        if around is None or use is None or on_gpu(evidence) or not around.threads or saturated(evidence) is None:
            return None
        working = mean_during(evidence, use.workers) or 0.0
        processes = max(1, around.processes)
        threads = around.threads * processes
        crowded = threads > cores or threads + working > 1.5 * cores
        if not crowded:
            return None
        each = max(1, round((cores - working) / processes))
        if each >= around.threads:
            return None
        compute = share_of(evidence, seconds_of(evidence, *COMPUTE))
        of = f" in {processes} processes" if processes > 1 else ""
        beside = f" beside loader workers that keep {working:.1f} busy" if working >= 0.5 else ""
        return Finding(
            name=cls.finds,
            what=f"{threads} threads compute{of} on {cores} cores{beside}, and no core is idle: threads wait for each "
            "other",
            fix=f"set OMP_NUM_THREADS={each} (or torch.set_num_threads({each}) at the start)",
            severity=Severity.MEDIUM if compute >= 0.2 else Severity.NOTE,
            details=(f"forward and backward, which these threads compute, take {percent(compute)} of the step",),
            technique=cls.name,
            setting=str(each),
            sources=cls.sources,
        )

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
