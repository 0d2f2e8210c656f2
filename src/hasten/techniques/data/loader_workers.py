"""Load batches in worker processes while the step computes."""

from __future__ import annotations

import multiprocessing
import shutil
import sys
import weakref
from pathlib import Path
from typing import Any

from hasten import messages
from hasten.evidence import Evidence, LoaderFacts, Machine, Phase
from hasten.evidence.figures import percent
from hasten.evidence.machine import memory_free
from hasten.plan import Setting
from hasten.techniques.base import NO_LOADER, Choices, Effect, Liveness, Refusal, Resource, Technique
from hasten.techniques.data.fork_safety import holds_open, no_room_for_sockets
from hasten.techniques.replaced import ReplacedFunction, Replacements

_SHM = Path("/dev/shm")


class LoaderWorkers(Technique):
    """Load batches in worker processes.

    A setting is the number of workers, or a table `{num_workers, prefetch_factor}` (`persistent_workers`, from older
    plans, has no effect). Workers are forked at each pass's first batch, so they see everything the training did until
    then. During a pass, everything that samples depend on is watched: attributes, elements, arrays, globals and
    closures that the dataset's code reads. If any of it changes, in the training or because making a sample changes it
    (a counter), the training makes this batch and all later ones itself, and says so. Left alone are datasets that
    cannot be inspected, that print or write something, iterable ones, and samplers that may depend on the training.

    The setting is an upper bound. Each pass of a loader that has no workers of its own starts as many as the cores,
    memory and /dev/shm of the machine or container have room for, by what workers and batches took before; if memory
    runs short during a pass, the training makes the rest of it. Both are reported. A batch's random numbers are seeded
    by its number, so they are the same with any number of workers.

    Random augmentation draws other numbers in workers than in the main process, hence `sampling`; the training's other
    random numbers stay the same. OpenMP's threads are told to sleep while they wait, unless OMP_WAIT_POLICY is set: by
    default they spin on cores that the workers need. The Trainer's process has already started, so there it comes too
    late.
    """

    name = "loader_workers"
    effect = Effect.SAMPLING
    relieves = Resource.DATA
    sources = ("Falcon, tip 1", "Lin, tip 1", "Kuhn, tip 2")
    values = dict
    example = "{num_workers = 2, prefetch_factor = 4}"
    acts_on = "a DataLoader"
    liveness = Liveness.PASS

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        table = setting if isinstance(setting, dict) else {"num_workers": setting}
        self.num_workers = int(table["num_workers"])
        self.prefetch_factor = int(table.get("prefetch_factor", 2))
        # Loader -> (attributes while this is on, attributes before), for switching.
        self._loaders: weakref.WeakKeyDictionary[Any, tuple[dict[str, Any], dict[str, Any]]]
        self._loaders = weakref.WeakKeyDictionary()

    @classmethod
    def check(cls, setting: Setting) -> str:
        """Accept a number, or a table with `num_workers`."""
        known = ("num_workers", "prefetch_factor", "persistent_workers")
        table = setting if isinstance(setting, dict) else {"num_workers": setting}
        if unknown := [key for key in table if key not in known]:
            return f"has no option {unknown[0]!r}; it has {', '.join(known)}"
        if "num_workers" not in table:
            return "needs num_workers"
        for key, least in (("num_workers", 0), ("prefetch_factor", 1)):
            value = table.get(key, least)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                return f"{key} must be a whole number of at least {least}"
        if not isinstance(table.get("persistent_workers", True), bool):
            return "persistent_workers must be true or false"
        return ""

    @classmethod
    def useless(cls, setting: Setting, machine: Machine) -> str:
        """Return that there are too many workers for the machine's cores."""
        workers = setting["num_workers"] if isinstance(setting, dict) else setting
        if isinstance(workers, int) and workers > 2 * machine.cores:
            return f"{workers} workers on {machine.cores} cores would wait for each other"
        return ""

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose numbers of workers that the machine's cores and /dev/shm allow."""
        loader = evidence.train_loader
        if loader is None:
            return NO_LOADER
        if loader.probe is not None and loader.probe.fork_unsafe:
            return Refusal(f"the dataset {loader.probe.fork_unsafe}: not safe to share with worker processes")
        if loader.iterable:
            return Refusal("an iterable dataset keeps its place in the process that reads it")
        counts = [n for n in _counts(evidence.machine.cores) if n != loader.num_workers]
        if evidence.share(Phase.DATA) < 0.02:
            return Refusal(f"the step waits {percent(evidence.share(Phase.DATA))} of its time for data")
        settings: list[Setting] = [
            {"num_workers": count, "prefetch_factor": depth}
            for count in counts
            if (depth := _depth(loader, count)) >= 1
        ]
        if not settings:
            return Refusal(_no_room(loader))
        return Choices(tuple(settings), f"the step waits {percent(evidence.share(Phase.DATA))} of its time for data")

    def environment(self, env: dict[str, str]) -> None:
        """Make OpenMP's threads sleep while they wait; OpenMP reads this when it starts."""
        if self.num_workers:
            env.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    def loader_options(self, options: dict[str, Any]) -> None:
        """Change the number of workers of a loader that has some."""
        if self.switchable or not options["num_workers"] or _no_children():
            return  # see `loader`
        if why := _why_not(options):
            self.refused(why)
            return
        options["num_workers"] = self.num_workers
        options["prefetch_factor"] = self.prefetch_factor if self.num_workers else None
        if not self.num_workers:
            options["persistent_workers"] = False
            options["timeout"] = 0
            options["multiprocessing_context"] = None
        self.did("loader")

    def loader(self, loader: Any) -> None:
        """Let workers make the passes of a loader that has none."""
        if loader.num_workers and self.switchable:
            self._loader_with_workers(loader)
            return
        from torch.utils.data import DataLoader

        from hasten.data.sampler_order import why_not
        from hasten.data.worker_pass import WorkerPasses, hand_over

        if loader.num_workers or not self.num_workers or _no_children():
            return
        why = no_room_for_sockets() or _unsafe(loader.dataset)
        why = why or why_not(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        if type(loader)._get_iterator is not DataLoader._get_iterator:
            why = why or f"{type(loader).__name__}makes its own iterators"
        if why:
            self.refused(why)
            return
        handed = WorkerPasses(self.num_workers, self.prefetch_factor, self._give_up, self._fewer)
        _PASSES.need(self)
        if self.switchable:
            self._note(loader, {"_hasten_workers": handed})
        else:
            hand_over(loader, handed)
        self.did("loader")

    def _loader_with_workers(self, loader: Any) -> None:
        """Note the attributes of a loader with workers of its own while this is on."""
        from torch.utils.data import DataLoader

        if _no_children():
            return
        names = ("dataset", "batch_sampler", "sampler", "worker_init_fn", "collate_fn")
        why = _why_not({name: getattr(loader, name) for name in names})
        if type(loader)._get_iterator is not DataLoader._get_iterator:
            why = why or f"{type(loader).__name__}makes its own iterators"
        if loader.persistent_workers:  # stopping them would lose each worker's RNG state
            why = why or "its workers outlive a pass"
        if why:
            self.refused(why)
            return
        without: dict[str, Any] = {"num_workers": 0, "prefetch_factor": None, "timeout": 0}
        some = {"num_workers": self.num_workers, "prefetch_factor": self.prefetch_factor}
        self._note(loader, some if self.num_workers else without)
        self.did("loader")

    def _note(self, loader: Any, options: dict[str, Any]) -> None:
        self._loaders[loader] = options, {}
        if self.active:
            self._give(loader)

    def teardown(self) -> None:
        """Leave later passes to torch."""
        _PASSES.leave(self)

    def on(self) -> None:
        """Use workers in passes that begin from here on."""
        super().on()
        for loader in list(self._loaders):
            self._give(loader)

    def off(self) -> None:
        """Restore the loaders' own settings for later passes. A pass that is under way keeps its workers."""
        super().off()
        for loader, (options, earlier) in list(self._loaders.items()):
            for name, value in earlier.items():
                if loader.__dict__.get(name) is options[name]:  # otherwise the script has set it since
                    loader.__dict__[name] = value

    def _give(self, loader: Any) -> None:
        options, earlier = self._loaders[loader]
        earlier.update((name, loader.__dict__.get(name)) for name in options)
        loader.__dict__.update(options)

    def _give_up(self, why: str) -> None:
        known = f"left alone: {why}" in self.acted  # said of an earlier loader: some scripts build one each epoch
        self.refused(why)
        if known:
            return
        messages.tell(f"hasten: loader_workers: {why}; the training makes this loader's batches itself from here on.")

    def _fewer(self, why: str) -> None:
        messages.tell(f"hasten: loader_workers: {why}")


def _passes() -> list[ReplacedFunction]:
    from torch.utils.data import DataLoader

    from hasten.data.worker_pass import handing_over

    return [ReplacedFunction(DataLoader, "_get_iterator", handing_over)]


_PASSES = Replacements(_passes)


def _no_children() -> bool:
    """Return whether this process must not start children (a worker, a daemon), or cannot fork."""
    import torch

    inside = torch.utils.data.get_worker_info() is not None or multiprocessing.current_process().daemon
    return inside or sys.platform != "linux"


def _unsafe(dataset: Any) -> str:
    from torch.utils.data import IterableDataset

    if isinstance(dataset, IterableDataset):
        return "an iterable dataset keeps its place in the process that reads it"
    if unsafe := holds_open(dataset):
        return f"the dataset {unsafe}"
    return ""


def _why_not(options: dict[str, Any]) -> str:
    """Return why a loader must keep its number of workers; "" if another number gives the same samples."""
    from torch.utils.data import default_collate

    from hasten.data.sampler_order import why_not
    from hasten.data.snapshot import Snapshot
    from hasten.data.worker_batch import says

    dataset = options["dataset"]
    if why := _unsafe(dataset):
        return why
    order = options["batch_sampler"] if options["batch_sampler"] is not None else options["sampler"]
    if order is not None and (why := why_not(order)):
        return why
    if options["worker_init_fn"] is not None:
        return "its workers are set up by a worker_init_fn"
    snapshot = Snapshot({"dataset": dataset, "collate_fn": options["collate_fn"] or default_collate})
    return (
        (snapshot.blind and f"the dataset {snapshot.blind}")
        or says(snapshot)
        or ("samples change what it holds" * snapshot.stores)
    )


def _counts(cores: int) -> list[int]:
    """Return numbers of workers worth trying, best guess first: all cores but one, as the step needs one too."""
    spread = [max(1, cores - 1), cores, max(1, cores // 2), min(cores, 4), 1]
    return list(dict.fromkeys(spread))[:4]


def _depth(loader: LoaderFacts, workers: int) -> int:
    """Return how many batches each worker may prefetch within half of /dev/shm and free memory; 0 if not even one."""
    if not loader.batch_bytes or not _SHM.is_dir():
        return 2
    room = min(shutil.disk_usage(_SHM).free, memory_free()) // 2  # a container's /dev/shm counts as its memory
    return min(4, room // (loader.batch_bytes * workers))


def _no_room(loader: LoaderFacts) -> str:
    size = loader.batch_bytes / 2**20
    if memory_free() < shutil.disk_usage(_SHM).free:
        return f"too little memory is free for workers' batches of {size:.1f} MiB"
    return f"/dev/shm is too small for workers' batches of {size:.1f} MiB; docker run --shm-size=... enlarges it"
