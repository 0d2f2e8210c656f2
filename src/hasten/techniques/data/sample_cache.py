"""Read and decode samples once, then take them from memory or from a disk."""

from __future__ import annotations

import functools
import operator
import os
import sys
import weakref
from typing import Any

from hasten import messages
from hasten.data import SampleStore
from hasten.data.disk_folder import SampleFolder, room_on_disk
from hasten.data.disk_store import DiskStore
from hasten.data.sample_store import room
from hasten.data.stand_in import StandIn, called_by, plain_copy
from hasten.errors import HastenError
from hasten.evidence import Evidence, LoaderFacts, Phase, Probe
from hasten.evidence.figures import percent
from hasten.plan import Setting
from hasten.techniques.base import NO_LOADER, Choices, Effect, Liveness, Refusal, Resource, Technique
from hasten.techniques.data.batched_fetch import holds_rows
from hasten.techniques.data.memoized import DRAWS, Memoized, StaleSample
from hasten.techniques.data.memoized_on_disk import MemoizedOnDisk

FAST = 20e-6  # seconds: the cache's own cost per sample
FROM_DISK, DISK_SPEED = 100e-6, 400e6  # a modest disk: seconds per sample, and bytes per second
_KEYS = (str, bytes, int)  # types of a loader function's argument
_LOADER_FUNCTION = "loader"  # where torchvision's DatasetFolder and its many imitations keep it


class SampleCache(Technique):
    """Keep decoded samples in memory shared by all worker processes, or on disk.

    "samples" keeps the results of `dataset[i]`, if the same index always gives the same sample. "decoded" keeps the
    results of the dataset's `loader(path)` (ImageFolder's idiom), so that random augmentation after it stays random.
    "both" keeps samples of datasets that draw no random numbers (mostly validation), and decoded files of the others.
    The numbers stay the same; the first epoch fills the cache. In the training's own process, samples that were taken
    once are also kept as objects and copied (at most 512 MiB and an eighth of the free memory).

    A sample is taken from the cache only while everything that it was made of is unchanged: what its code reads
    (attributes, elements, arrays, globals, closures), and the files that were opened for it. Left alone, with the
    reason, are datasets that cannot be inspected, and samples that draw random numbers, change something, have parts
    that share memory, or are read by native code that opens files unseen. One in 200 samples, chosen at random, is made
    again and compared. If one differs, that batch and all later ones are made without the cache, and a message says
    that earlier ones may be wrong.

    A table keeps samples on disk, `{keep = "decoded", where = "disk"}`: for data larger than memory, for workers that
    are not forked, for several ranks, and for later runs. The file is named by everything that samples are made of
    (dataset, code, transforms, libraries). The folder (`cache_dir`; by default the user's on the fastest local disk)
    has a size limit (`cache_size` bytes; by default a quarter of what is free), and files that no training uses are
    removed first. Each process compares its first 16 samples, and one in 20 of its first pass.
    """

    name = "sample_cache"
    effect = Effect.EXACT
    relieves = Resource.DATA
    sources = ("Falcon, tip 1", "Lin, tip 1", "Lin, tip 3")
    values = ("decoded", "samples", "both")
    example = '{keep = "decoded", where = "disk"}'
    acts_on = 'a map-style dataset (for "decoded": with a `loader(path)` function)'
    liveness = Liveness.PASS

    def __init__(self, setting: Any) -> None:
        super().__init__(setting)
        table = setting if isinstance(setting, dict) else {"keep": setting}
        self.keep = table["keep"]
        self.on_disk = table.get("where") == "disk"
        self._pid = os.getpid()
        self._reported: set[tuple[str, str]] = set()
        self._cache_dir, self._cache_size = table.get("cache_dir"), table.get("cache_size")
        # ("samples" or "decoded", id of a dataset) -> memo. The memo holds the dataset, and its loaders hold the memo.
        self._memos: weakref.WeakValueDictionary[tuple[str, int], Memoized] = weakref.WeakValueDictionary()

    @classmethod
    def check(cls, setting: Setting) -> str:
        """Accept a word, or a table with `keep` and `where`."""
        if not isinstance(setting, dict):
            return super().check(setting)
        options = ("keep", "where", "cache_dir", "cache_size")
        if unknown := [key for key in setting if key not in options]:
            return f"has no option {unknown[0]!r}; it has {', '.join(options)}"
        if setting.get("keep") not in cls.values:
            return 'needs keep = "decoded", "samples" or "both"'
        if setting.get("where", "memory") not in ("memory", "disk"):
            return 'where must be "memory" or "disk"'
        if setting.get("where") == "disk" and setting.get("keep") == "both":
            return 'where = "disk" goes with keep = "decoded" or "samples"'
        if setting.get("where") != "disk" and (extra := [key for key in options[2:] if key in setting]):
            return f'{extra[0]} goes with where = "disk"'
        if not isinstance(setting.get("cache_dir", "x"), str) or not setting.get("cache_dir", "x"):
            return "cache_dir must be the name of a folder"
        size = setting.get("cache_size", 1)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            return "cache_size must be a whole number of bytes"
        return ""

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """What repeats itself in this dataset and fits into memory."""
        loader = evidence.train_loader
        if loader is None:
            return NO_LOADER
        if loader.iterable:
            return Refusal("an iterable dataset has no index to keep samples by")
        if loader.probe is None or loader.probe.failed:
            return Refusal(
                f"the dataset could not be asked twice: {loader.probe.failed if loader.probe else 'no probe'}"
            )
        if loader.start_method != "fork" and loader.num_workers:
            return Refusal(
                f"workers are started by {loader.start_method}, which shares no memory with them; "
                'sample_cache = {keep = "samples", where = "disk"} in a plan keeps samples for them'
            )
        if evidence.share(Phase.DATA) < 0.02:
            return Refusal(f"the step waits {percent(evidence.share(Phase.DATA))} of its time for data")
        return cls._choose(evidence, loader, loader.probe)

    @classmethod
    def _choose(cls, evidence: Evidence, loader: LoaderFacts, probe: Probe) -> Choices | Refusal:
        used_loaders = [loader_facts for loader_facts in evidence.loaders if loader_facts.role != "unused"]
        if probe.repeatable and all(
            loader_facts.probe and loader_facts.probe.repeatable for loader_facts in used_loaders
        ):
            setting, seconds, size = "samples", probe.sample_seconds, probe.sample_bytes
        elif probe.loader_function and probe.loader_repeatable:
            setting, seconds, size = "decoded", probe.loader_seconds, probe.loader_bytes
        elif probe.repeatable is False:
            return Refusal(f"the same index gives other samples, and {loader.dataset} has no `loader` function to keep")
        else:
            return Refusal("not every loader's dataset gives the same sample for the same index")
        if seconds < FAST:
            return Refusal(f"a sample takes {seconds * 1e6:.0f} us, no more than the cache itself")
        why = f"making a sample takes {seconds * 1e6:.0f} us and gives the same each time"
        need = size * (loader.samples or 0)
        other_stores = [
            (loader_facts.probe, loader_facts.samples or 0)
            for loader_facts in used_loaders
            if loader_facts.probe and loader_facts.probe.repeatable
        ]
        other_bytes = sum((facts.sample_bytes + facts.loader_bytes) * count for facts, count in other_stores)
        # Each of the two stores gets half of the room.
        if setting == "decoded" and other_bytes and 2 * (need + other_bytes) <= room():
            return Choices(("both",), f"{why}; whole samples of another loader do, too")
        if need <= room():
            return Choices((setting,), why)
        short = f"{need / 2**30:.1f} GiB of samples do not fit in half the free memory"
        if need > (most := room_on_disk()):
            return Refusal(f"{short}, nor in the {most / 2**30:.1f} GiB that the fastest disk has for them")
        if seconds < 2 * (FROM_DISK + size / DISK_SPEED):
            return Refusal(
                f"{short}, and to read one of {size / 2**10:.0f} KiB from a disk may take as long as to make it"
            )
        return Choices(({"keep": setting, "where": "disk"},), f"{why}; {short}")

    def loader_options(self, options: dict[str, Any]) -> None:
        """Create the memo of decoded files before any worker is forked, and wrap the loader function with it."""
        from torch.utils.data import IterableDataset

        dataset = options["dataset"]
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            return
        if self.keep == "samples":
            return  # see `loader`
        inner = with_loader_function(dataset)
        if inner is None or isinstance(called_by(inner.loader), CachedFunction):
            return
        memo = self._keeping(inner, {"loader": inner.loader})
        if memo is not None and not memo.is_over():
            inner.loader = StandIn(inner.loader, CachedFunction(inner.loader, memo))
            self._memos["decoded", id(inner)] = memo
            memo.paused = not self.active
            self.did("dataset")

    def loader(self, loader: Any) -> None:
        """Create the memo of a dataset's samples, which all loaders of the same dataset share."""
        from torch.utils.data import IterableDataset

        dataset = loader.dataset
        if self.keep == "decoded" or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            return
        if loader.batch_sampler is None:
            return
        if holds_rows(dataset):
            return  # already in memory
        if why := _fetches_of_its_own(dataset):
            if self.keep == "samples":
                self.refused(why)
            return
        memo = self._memos.get(("samples", id(dataset)))
        if memo is None:
            memo = self._keeping(dataset, {"dataset": dataset})
            if memo is None or (self.keep == "both" and (memo.is_over() or memo.may_draw)):
                return
            self._memos["samples", id(dataset)] = memo
            if not memo.is_over():
                self.did("dataset")
            memo.paused = not self.active
        loader.__dict__["_hasten_kept"] = memo  # loaders own the memo: it is freed with the last one

    def fetcher(self, fetcher: Any) -> Any:
        """Take samples from the memo."""
        from torch.utils.data._utils.fetch import _MapDatasetFetcher

        if self.keep == "decoded" or type(fetcher) is not _MapDatasetFetcher or not fetcher.auto_collation:
            return fetcher
        memo = self._memos.get(("samples", id(fetcher.dataset)))
        if memo is None and self.on_disk:
            memo = self._in_worker(fetcher.dataset)
        if memo is None or memo.is_over():
            return fetcher
        return _CachedFetcher(fetcher, memo) if memo.look(whole=True) else fetcher

    def _keeping(self, dataset: Any, roots: dict[str, Any]) -> Memoized | None:
        """Return a new memo of a dataset's samples; None if the folder on disk cannot be used."""
        samples = len(dataset)
        name = f"{type(dataset).__qualname__} of {samples:,} samples"
        give_up = functools.partial(self._give_up, name)
        if self.keep == "both" and "dataset" in roots:
            give_up = functools.partial(self._give_up_samples, ("samples", id(dataset)), name)
        if not self.on_disk:
            return Memoized(SampleStore(samples, room()), roots, give_up)
        try:
            files = DiskStore(samples, SampleFolder(self._cache_dir, self._cache_size))
        except HastenError as error:
            give_up(error.message)
            return None
        return MemoizedOnDisk(files, roots, give_up)

    def _in_worker(self, dataset: Any) -> Memoized | None:
        """Return the memo for a spawned worker, in whose process no loader was built."""
        from torch.utils.data import get_worker_info

        if get_worker_info() is None or self._pid != os.getpid() or holds_rows(dataset) or _fetches_of_its_own(dataset):
            return None
        memo = self._keeping(dataset, {"dataset": dataset})
        if memo is not None:
            self._memos["samples", id(dataset)] = memo
            memo.paused = not self.active
        return memo

    def __reduce__(self) -> Any:
        return type(self), (self.setting,)  # in another process there are no loaders yet

    def on(self) -> None:
        """Take samples from the memos, including what they hold from before."""
        super().on()
        self._pause(False)

    def off(self) -> None:
        """Make each sample; the memos keep what they hold."""
        super().off()
        self._pause(True)

    def _pause(self, paused: bool) -> None:
        for memo in list(self._memos.values()):
            memo.paused = paused

    def _give_up_samples(self, place: tuple[str, int], dataset: str, why: str) -> None:
        """Under "both", report that a dataset's samples cannot be kept only if some were kept before."""
        if why != DRAWS and place in self._memos:
            self._give_up(dataset, why, "has only decoded files kept from here on")

    def _give_up(self, dataset: str, why: str, then: str = "is read without the cache from here on") -> None:
        self.refused(why)
        if self.active and (dataset, why) not in self._reported:  # some scripts build the same dataset in each epoch
            self._reported.add((dataset, why))
            messages.tell(f"hasten: sample_cache: {why}; the dataset ({dataset}) {then}.")


def _fetches_of_its_own(dataset: Any) -> str:
    """Return why a dataset's batches are not made of single `__getitem__` calls; "" if they are."""
    from torch.utils.data import Subset

    while type(dataset) is Subset and "__getitems__" not in vars(dataset):
        dataset = dataset.dataset
    own = getattr(dataset, "__getitems__", None)
    return f"{type(dataset).__name__} makes whole batches itself (`__getitems__`)" if own else ""


class _CachedFetcher:
    """Fetcher that takes samples from a memo, in front of torch's."""

    def __init__(self, fetcher: Any, memo: Memoized) -> None:
        self._fetcher = fetcher
        self._memo = memo

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    def __del__(self) -> None:  # with the pass's iterator
        if not sys.is_finalizing():
            self._memo.end_of_pass()

    def fetch(self, indices: Any) -> Any:
        """Return the batch that the wrapped fetcher would return, with samples from the memo."""
        fetcher, memo = self._fetcher, self._memo
        if type(indices) not in (list, tuple) or not set(map(type, indices)) <= {int}:
            return fetcher.fetch(indices)
        if not memo.look(indices) or _fetches_of_its_own(fetcher.dataset):
            return fetcher.fetch(indices)
        # By the operator, as torch does: an instance attribute `__getitem__` has no effect in Python.
        get, make, samples = memo.get, functools.partial(operator.getitem, fetcher.dataset), []
        for index in indices:
            try:
                samples.append(make(index) if memo.is_over() else get(index, make))
            except StaleSample:  # other samples of this batch may be wrong too
                break
        # Outside the handler, so that the script's errors do not show ours as their context.
        return fetcher.collate_fn(samples) if len(samples) == len(indices) else fetcher.fetch(indices)


class CachedFunction:
    """A dataset's `loader(path)` function behind a memo."""

    def __init__(self, function: Any, memo: Memoized) -> None:
        self.function = function
        self.memo = memo

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and len(args) == 1 and type(args[0]) in _KEYS and self.memo.look():
            try:
                return self.memo.get(args[0], self.function)
            except StaleSample:
                pass
        return self.function(*args, **kwargs)

    def __reduce__(self) -> Any:
        # A pickled copy can share a store on disk only; otherwise it becomes the plain function.
        files = self.memo.files()
        return plain_copy(self.function) if files is None else (_unpickled, (self.function, files))


def _unpickled(function: Any, files: DiskStore) -> Any:
    """Return the function of an unpickled copy, behind the same store on disk."""
    memo = MemoizedOnDisk(files, {"loader": function}, _tell)
    return function if memo.is_over() else StandIn(function, CachedFunction(function, memo))


def _tell(why: str) -> None:
    messages.tell(f"hasten: sample_cache: {why}; this copy of the dataset is read without the cache.")


def with_loader_function(dataset: Any) -> Any:
    """Return the dataset, possibly inside Subsets, that has a `loader` function; None if there is none."""
    for _ in range(8):
        function = getattr(dataset, "__dict__", {}).get(_LOADER_FUNCTION)
        if callable(function):
            # A method of the dataset may read state that changes between epochs; a plain function has its argument
            # only.
            return None if getattr(function, "__self__", None) is dataset else dataset
        dataset = getattr(dataset, "dataset", None)
        if dataset is None:
            return None
    return None
