"""Worker processes that load batches while the step computes."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from hasten.evidence import Evidence, Finding, HowKnown, LoaderFacts, Machine, Phase
from hasten.evidence.figures import percent
from hasten.evidence.waiting import PASSING, in_ms, mean_during, ordinary_seconds, typical_wait
from hasten.evidence.weigh import on_gpu, share_of, timed
from hasten.plan import Setting
from hasten.techniques.base import Choices, Effect, Refusal, Resource, Technique, toml_value

_SHM = Path("/dev/shm")
_OPEN = {
    "sqlite3.Connection",
    "sqlite3.Cursor",
    "h5py._hl.files.File",
    "h5py._hl.dataset.Dataset",
    "zipfile.ZipFile",
    "tarfile.TarFile",
    "lmdb.Environment",
    "builtins.Environment",
}  # fmt: skip  (the last is lmdb's too)
_CLOSED = (str, bytes, int, float, type(None), type, ModuleType, FunctionType)  # nothing to be found inside these
_LIBRARIES = ("logging", "hasten.")  # nor in these
_CLEARLY = 0.05  # of the step; so much more must be saved for a further change
_DEPTH, _MOST, _FIRST = 8, 2000, 16  # how far `parts_of` looks
_UNSAFE_TO_FORK = frozenset(
    [
        "sqlite3.Connection",
        "sqlite3.Cursor",
        "h5py._hl.files.File",
        "h5py._hl.dataset.Dataset",
        "lmdb.Environment",
        "builtins.Environment",
        "zipfile.ZipFile",
        "tarfile.TarFile",
    ]
)


class LoaderWorkers(Technique):
    """Load in worker processes that stay alive between epochs.

    A setting is the number of workers, or a table `{num_workers, prefetch_factor, persistent_workers}`.
    Random augmentation draws other numbers in workers than in the main process, hence `sampling`. An
    IterableDataset gets at most one worker, since each further one would read the whole stream again.
    """

    name = "loader_workers"
    finds = "workers_zero"
    effect = Effect.SAMPLING
    relieves = Resource.DATA
    sources = ("Falcon, tip 1", "Lin, tip 1", "Kuhn, tip 2")
    values = dict
    acts_on = "a DataLoader"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        table = setting if isinstance(setting, dict) else {"num_workers": setting}
        self.num_workers = int(table["num_workers"])
        self.prefetch_factor = int(table.get("prefetch_factor", 2))
        self.persistent = bool(table.get("persistent_workers", True))

    @classmethod
    def check(cls, setting: Setting) -> str:
        """A number, or a table with `num_workers`."""
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
        """More workers than cores only wait for each other."""
        workers = setting["num_workers"] if isinstance(setting, dict) else setting
        if isinstance(workers, int) and workers > 2 * machine.cores:
            return f"{workers} workers on {machine.cores} cores would wait for each other"
        return ""

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Numbers of workers that this machine's cores and /dev/shm allow."""
        loader = evidence.train_loader
        if loader is None:
            return Refusal("the script trains without a DataLoader")
        if loader.probe is not None and loader.probe.fork_unsafe:
            return Refusal(f"the dataset {loader.probe.fork_unsafe}: not safe to share with worker processes")
        if loader.iterable:
            counts = [1] if loader.num_workers == 0 else []
        else:
            cores = evidence.machine.cores
            counts = [n for n in _counts(cores) if n != loader.num_workers]
        if evidence.share(Phase.DATA) < 0.02 and (loader.num_workers == 0 or loader.persistent_workers):
            return Refusal(f"the step waits {percent(evidence.share(Phase.DATA))} of its time for data")
        if loader.num_workers and not loader.persistent_workers:
            counts.insert(0, loader.num_workers)
        settings: list[Setting] = [
            {"num_workers": count, "prefetch_factor": depth, "persistent_workers": True}
            for count in counts
            if (depth := _depth(loader, count)) >= 1
        ]
        if not settings:
            return Refusal(_no_room(loader) if counts else "an iterable dataset that already has its worker")
        return Choices(tuple(settings), f"the step waits {percent(evidence.share(Phase.DATA))} of its time for data")

    @classmethod
    def finding(cls, evidence: Evidence) -> Finding | None:
        """Batches made in the training process that workers could make meanwhile.

        Rests on the measured wait, from which `workers_for` works out what is left of it with workers; silent for
        tensors in memory, whose samples cost less than a batch passed between processes (Falcon, tip 1). Where threads
        of the training that wait for work would take the workers' cores, it says so.
        """
        loader = evidence.train_loader
        if loader is None or loader.num_workers or share_of(evidence, typical_wait(evidence)) < 0.05:
            return None
        asked = loader.probe
        if loader.dataset == "TensorDataset" or (asked is not None and (asked.in_memory or asked.fork_unsafe)):
            return None
        proposal = workers_for(evidence, loader)
        workers = proposal.workers
        if not workers:
            return None
        table: Setting = {"num_workers": workers, "prefetch_factor": 2, "persistent_workers": True}
        left = ordinary_seconds(evidence) - proposal.seconds
        how = (
            f"with {workers} of them the step would take {in_ms(left)}: the greatest of its own computation, a batch's "
            f"making shared by {workers} workers, and all work shared by {room_for(evidence):.2g} cores"
        )
        and_threads = (
            ", and let the training compute on one thread (torch.set_num_threads(1)): others would take the workers' "
            "cores while they wait for work"
            if proposal.one_thread
            else ""
        )
        return timed(
            cls.finds,
            f"the training process makes every batch itself (num_workers=0), {in_ms(typical_wait(evidence))} of each "
            f"{in_ms(ordinary_seconds(evidence))} step, while the model waits",
            f"give the loader num_workers={workers}, persistent_workers=True{and_threads}",
            share_of(evidence, proposal.seconds),
            HowKnown.ESTIMATED,
            place=loader.where,
            details=(how,),
            technique=cls.name,
            setting=toml_value(table),
            sources=cls.sources,
        )

    def loader_options(self, options: dict[str, Any]) -> None:
        """Give the loader its workers; what the script chose for itself beyond them stays."""
        import torch
        from torch.utils.data import IterableDataset

        if torch.utils.data.get_worker_info() is not None or multiprocessing.current_process().daemon:
            return  # such a process may have no children
        iterable = isinstance(options["dataset"], IterableDataset)
        if iterable and (self.num_workers > 1 or options["num_workers"]):
            self.refused("an iterable dataset may repeat itself in further workers")
            return
        if unsafe := holds_open(options["dataset"]):
            self.refused(f"the dataset {unsafe}")
            return
        options["num_workers"] = self.num_workers
        options["prefetch_factor"] = self.prefetch_factor if self.num_workers else None
        options["persistent_workers"] = self.persistent and self.num_workers > 0
        if not self.num_workers:
            options["timeout"] = 0
            options["multiprocessing_context"] = None
        self.did("loader")


@dataclass(frozen=True)
class Proposal:
    """Workers for a loader that has none.

    Attributes:
        workers: How many; 0: none.
        seconds: What they would save of each step.
        one_thread: They need the training to compute on one thread.
    """

    workers: int
    seconds: float
    one_thread: bool = False


def workers_for(evidence: Evidence, loader: LoaderFacts) -> Proposal:
    """How many workers would do for a loader without any, and what they would save.

    With n workers a step takes the longest of its own computation, a batch's making shared by n, and the CPU's work
    shared by the cores it can have; a batch that a worker passes on costs something too. The fewest that come within
    2 % of the best.

    The work is what the CPU was busy with. Threads that wait for torch's next operation are busy too, and stay so
    beside workers: where a sample is made as quickly on one thread, computing on one may be better.
    """
    wait, step, cores = typical_wait(evidence), ordinary_seconds(evidence), evidence.machine.cores
    compute, room = step - wait, room_for(evidence)
    used = mean_during(evidence, evidence.use.cpu) if evidence.use is not None else None
    threads = 1 if on_gpu(evidence) else max(1, min(cores, evidence.flags.threads or cores))
    most = 1 if loader.iterable else cores
    fitting = [count for count in range(1, most + 1) if _fits(evidence.machine, loader, count)]
    if not fitting:
        return Proposal(0, 0.0)

    def best(compute: float, make: float, work: float, one_thread: bool) -> Proposal:
        def step_with(workers: int) -> float:
            return max(compute + PASSING, (make + PASSING) / workers, (work + PASSING) / room)

        least = min(map(step_with, fitting))
        count = next(count for count in fitting if step_with(count) <= 1.02 * least)
        return Proposal(count, step - step_with(count), one_thread)

    chosen = best(compute, wait, wait + compute * threads if used is None else used * step, one_thread=False)
    alone = loader.probe.one_thread if loader.probe is not None else 0.0
    if alone and threads > 1:
        make, longest = alone * wait, compute * threads
        other = best(longest, make, make + longest, one_thread=True)
        if other.seconds - chosen.seconds > _CLEARLY * step:
            chosen = other
    return chosen if chosen.seconds > 0 else Proposal(0, 0.0)


def room_for(evidence: Evidence) -> float:
    """Cores' worth of CPU that the training may have: all, less half of what others used; all where nobody looked.

    Half, since others would have to share it with further processes of the training.
    """
    cores, use = evidence.machine.cores, evidence.use
    used = mean_during(evidence, use.cpu) if use is not None else None
    if use is None or used is None or not use.cores:
        return cores
    others = max(0.0, sum(use.cores) - used)
    return max(cores / 2, cores - others / 2)


def _fits(machine: Machine, loader: LoaderFacts, workers: int) -> bool:
    """Whether two batches of each worker fit into half of the machine's /dev/shm."""
    return not machine.shm_bytes or 2 * workers * loader.batch_bytes <= machine.shm_bytes // 2


def draw_base_seed(loader: Any) -> None:
    """Draw what torch draws for an epoch's new iterator, where workers that stayed alive get none.

    To be called before `iter(loader)` when workers are persistent by hasten's choice, not by the script's, and
    this is not the loader's first epoch: the shuffle of this and later epochs is then the one without workers.
    """
    import torch

    if getattr(loader, "_iterator", None) is not None:
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


def holds_open(dataset: Any) -> str:
    """What a dataset holds that must not cross a fork: "holds an open sqlite3.Connection (.db)", or ""."""
    import io
    import sys

    for name, value in parts_of(dataset):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if any(value is stream for stream in (sys.stdin, sys.stdout, sys.stderr)):
            continue
        if kind in _OPEN or (isinstance(value, io.IOBase) and not isinstance(value, io.BytesIO | io.StringIO)):
            return f"holds an open {kind.removeprefix('builtins.')} (.{name})"
    return holds_on_device(dataset)


def holds_on_device(dataset: Any) -> str:
    """Which tensor outside the host's memory a dataset holds: "holds a tensor on cuda (.x)", or ""."""
    import torch

    for name, value in parts_of(dataset):
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            return f"holds a tensor on {value.device.type} (.{name})"
    return ""


def parts_of(dataset: Any) -> Iterator[tuple[str, Any]]:
    """What a dataset holds, with the attribute it hangs from: objects inside objects, the first elements of lists."""
    queue: list[tuple[str, Any, int]] = [("", dataset, 0)]
    seen: set[int] = set()
    for name, value, depth in queue:  # grows meanwhile
        inside = getattr(value, "__dict__", {})
        if id(value) in seen or isinstance(value, _CLOSED) or type(value).__module__.startswith(_LIBRARIES):
            continue
        seen.add(id(value))
        yield name, value
        if depth == _DEPTH or len(seen) > _MOST:
            continue
        if isinstance(value, list | tuple | dict):
            first = islice(value.values() if isinstance(value, dict) else value, _FIRST)
            queue += [(name, element, depth + 1) for element in first]
        queue += [(key, part, depth + 1) for key, part in inside.items()]


def _counts(cores: int) -> list[int]:
    """Numbers of workers worth trying, best guess first: the step needs a core too."""
    spread = [max(1, cores - 1), cores, max(1, cores // 2), min(cores, 4), 1]
    return list(dict.fromkeys(spread))[:4]


def _depth(loader: LoaderFacts, workers: int) -> int:
    """Batches each worker may hold ready within half of what is free in /dev/shm; 0 when not even one fits."""
    if not loader.batch_bytes or not _SHM.is_dir():
        return 2
    room = shutil.disk_usage(_SHM).free // 2
    return min(4, room // (loader.batch_bytes * workers))


def _no_room(loader: LoaderFacts) -> str:
    size = loader.batch_bytes / 2**20
    return f"/dev/shm is too small for workers' batches of {size:.1f} MiB; docker run --shm-size=... enlarges it"
