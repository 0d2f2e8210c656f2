"""The number of threads that CPU kernels use."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from hasten.errors import HastenError
from hasten.evidence import Evidence, Machine
from hasten.plan import Setting
from hasten.techniques.base import Choices, Effect, Refusal, Resource
from hasten.techniques.compute.compile import KERNEL_THREADS
from hasten.techniques.switches import ProcessWide

if TYPE_CHECKING:
    from torch.nn import Module

_lost_threads = False  # whether this process is a fork of one that had several OpenMP threads, which do not exist here
_WOULD_HANG = "this process is a fork of one that computed on several threads: more threads than now would hang"


def _note_fork() -> None:
    global _lost_threads
    torch = sys.modules.get("torch")
    _lost_threads = _lost_threads or (torch is not None and torch.get_num_threads() > 1)


os.register_at_fork(after_in_child=_note_fork)


class CpuThreads(ProcessWide):
    """Set the number of intra-op threads (OMP_NUM_THREADS and torch's own).

    Small steps lose more time waking threads than they gain, and loader workers need cores too. Kernels split sums
    differently with another number of threads, hence `rounding`. Under the Trainer, whose process runs already, only
    torch's own number is set. If a script calls `torch.set_num_threads` itself, the number is set once more before the
    model's first forward. In a fork of a process that computed on several threads the number is never raised: OpenMP
    would wait for threads that only the parent has, for ever.
    """

    name = "cpu_threads"
    effect = Effect.ROUNDING
    relieves = Resource.COMPUTE
    sources = ("PyTorch performance tuning guide, CPU",)
    values = int

    @classmethod
    def useless(cls, setting: Setting, machine: Machine) -> str:
        """Refuse more threads than cores: they would wait for each other."""
        if isinstance(setting, int) and setting > machine.cores:
            return f"{setting} threads on {machine.cores} cores would wait for each other"
        return ""

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose all cores, half of them, and one, without the present number."""
        cores, now = evidence.machine.cores, evidence.flags.threads
        if evidence.models and all(model.device == "cuda" for model in evidence.models):
            return Refusal("the training computes on the GPU")
        counts: list[Any] = [n for n in dict.fromkeys((cores, max(1, cores // 2), 1)) if n != now]
        if not counts:
            return Refusal(f"{now} threads on {cores} cores already")
        return Choices(tuple(counts), f"{now} threads on {cores} cores")

    def environment(self, env: dict[str, str]) -> None:
        """Set the variables that OpenMP and MKL read once, when they start."""
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(self.setting)
        self.did("process")

    def process(self) -> None:
        """Set torch's number in a process that started with another one, as the Trainer's did."""
        import torch

        if self._would_hang():
            self.refused(_WOULD_HANG)
            return
        if torch.get_num_threads() != self.setting:
            self._switches.set(torch.get_num_threads, torch.set_num_threads, int(str(self.setting)))
        self.did("process")

    def on(self) -> None:
        """Set the number of threads.

        Raises:
            HastenError: More threads than now cannot be started in this process.
        """
        if self._would_hang():
            raise HastenError(_WOULD_HANG)
        super().on()

    def _would_hang(self) -> bool:
        import torch

        return _lost_threads and int(str(self.setting)) > torch.get_num_threads()

    def model(self, model: Module, args: tuple[Any, ...]) -> None:
        """Set the number again if the script called `torch.set_num_threads` before its first forward."""
        from torch.utils.data import get_worker_info

        # A model that runs in a loader's worker keeps the worker's single thread. So does `hasten check`, which
        # computes on one thread and sets this variable.
        if self.active and get_worker_info() is None and KERNEL_THREADS not in os.environ:
            self.process()
