"""Threads that make a loader's batches, in the place of worker processes or of the training itself."""

from __future__ import annotations

from typing import Any

from hasten import messages
from hasten.evidence import Evidence, Machine, Phase
from hasten.evidence.figures import percent
from hasten.plan import Setting
from hasten.techniques.base import Choices, Effect, Liveness, Refusal, Resource, Technique
from hasten.techniques.replaced import Replaced, Replacements

LEAST = 60e-6  # seconds a sample: below, threads mostly wait for each other's turn of the interpreter


class ThreadWorkers(Technique):
    """Make batches on threads of the training's process; a setting is their number.

    For map-style datasets whose samples draw no random numbers. Batches need no copy between processes, and the
    dataset's memory is not doubled; it pays where samples release the interpreter (files, decoding, NumPy). Worker
    processes of the script's own become threads; a loader without any is read ahead.

    The order is drawn as torch draws it. The first two batches are made by the training and looked over, one in 200
    later ones, by lot, is made again and compared, and a thread's batch is given only while all that it was made of is
    as it was. A sample that raises is made again by the training, which raises what it raises. Left alone, with the
    reason: samples or collate functions that may draw random numbers, change, say or write something, or cannot be
    looked into; samplers of a script's own; workers with a `worker_init_fn`, a timeout, or that outlive a pass.

    Worker processes see the dataset as it was when their pass began. Where a training changes it within a pass, that is
    told, and later passes have their processes again.
    """

    name = "thread_workers"
    effect = Effect.EXACT
    relieves = Resource.DATA
    sources = ("SPDL: threads that release the GIL", "pytorch#161044")
    values = int
    acts_on = "a map-style dataset"
    liveness = Liveness.PASS

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.threads = setting if isinstance(setting, int) else 1

    @classmethod
    def useless(cls, setting: Any, machine: Machine) -> str:
        """More threads than cores only wait for each other."""
        if isinstance(setting, int) and setting > 4 * machine.cores:
            return f"{setting} threads on {machine.cores} cores would wait for each other"
        return ""

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """As many threads as cores, where samples repeat themselves and take their time."""
        loader = evidence.train_loader
        if loader is None:
            return Refusal("the script trains without a DataLoader")
        if loader.iterable:
            return Refusal("an iterable dataset keeps its place: no sample of it is known before its turn")
        if loader.probe is None or loader.probe.failed:
            failed = loader.probe.failed if loader.probe else "no probe"
            return Refusal(f"the dataset could not be asked twice: {failed}")
        if not loader.probe.repeatable:
            return Refusal("samples draw random numbers, which threads would share with the training")
        if loader.num_workers and (loader.own_worker_init or loader.persistent_workers):
            return Refusal(
                "its workers outlive a pass" * loader.persistent_workers or "its workers are set up by a worker_init_fn"
            )
        if loader.probe.in_memory:
            return Refusal("samples lie in memory as tensors: `batched_fetch` gathers them at once")
        if evidence.share(Phase.DATA) < 0.02:
            return Refusal(f"the step waits {percent(evidence.share(Phase.DATA))} of its time for data")
        seconds, cores = loader.probe.sample_seconds, evidence.machine.cores
        if seconds < LEAST:
            return Refusal(f"a sample takes {seconds * 1e6:.0f} us, no more than a thread costs")
        counts = tuple(dict.fromkeys((min(cores, 8), max(1, cores // 2))))
        return Choices(counts, f"a sample takes {seconds * 1e6:.0f} us and draws no random numbers")

    def loader(self, loader: Any) -> None:
        """Have threads make the passes over a loader, where nothing speaks against it."""
        from torch.utils.data import DataLoader, IterableDataset, get_worker_info

        from hasten.data.ahead_batches import Threaded

        if isinstance(loader.dataset, IterableDataset) or get_worker_info() is not None:
            return
        why = ""
        if type(loader)._get_iterator is not DataLoader._get_iterator:
            why = f"{type(loader).__name__} makes iterators of its own"
        elif loader.num_workers and loader.persistent_workers:
            why = "its workers outlive a pass, and would not see what the training changes in the dataset"
        elif loader.num_workers and loader.worker_init_fn is not None:
            why = "its workers are set up by a worker_init_fn"
        elif loader.num_workers and (loader.timeout or not loader.in_order):
            why = "its workers have a timeout" if loader.timeout else "its workers give batches as they come"
        if why:
            self.refused(why)
            return
        _PASSES.need(self)
        loader.__dict__["_hasten_threaded"] = Threaded(self.threads, self._let_go, self._is_on, self._begun)

    def over(self) -> None:
        """Leave passes that begin later to torch."""
        _PASSES.leave(self)

    def _is_on(self) -> bool:
        return self.active

    def _begun(self) -> None:
        self.did("pass")

    def _let_go(self, why: str) -> None:
        known = f"left alone: {why}" in self.acted  # of a loader before: a script may make one for each epoch
        self.refused(why)
        if self.active and not known:
            messages.tell(f"hasten: thread_workers: {why}; this loader's batches are made as the script has it.")


def _passes() -> list[Replaced]:
    from torch.utils.data import DataLoader

    from hasten.data.ahead_batches import threading

    return [Replaced(DataLoader, "_get_iterator", threading)]


_PASSES = Replacements(_passes)
