"""Samples read and decoded once, then taken from memory."""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from hasten import messages
from hasten.data import SampleStore
from hasten.data.sample_store import pack, room
from hasten.evidence import Evidence, Finding, HowKnown, LoaderFacts, Phase, Probe
from hasten.evidence.figures import percent
from hasten.evidence.waiting import data_share, faster_loading
from hasten.evidence.weigh import timed
from hasten.techniques.base import Choices, Effect, Refusal, Resource, Technique, toml_value

_AUDITED, _AUDIT_EVERY = 16, 1000  # kept samples that are made again and compared: the first, and every n-th
_FAST = 20e-6  # seconds: what the cache itself takes per sample
_DEPTH, _MOST, _SHORT = 8, 5000, 64  # how far `state_of` looks
_LOADER_FUNCTION = "loader"  # where torchvision's DatasetFolder and its many imitations keep it


class SampleCache(Technique):
    """Keep decoded samples in memory that all worker processes share.

    Setting "samples" keeps what `dataset[i]` gives, where the same index was seen to give the same sample.
    Setting "decoded" keeps what the dataset's `loader(path)` gives (ImageFolder's idiom) and leaves the random
    augmentation behind it as it is. Either way the numbers stay the same; the first epoch fills the cache.
    """

    name = "sample_cache"
    finds = "samples_recomputed"
    effect = Effect.EXACT
    relieves = Resource.DATA
    sources = ("Falcon, tip 1", "Lin, tip 1", "Lin, tip 3")
    values = ("decoded", "samples")
    acts_on = "a map-style dataset"

    def __init__(self, setting: Any) -> None:
        super().__init__(setting)
        # id of a dataset -> a weak reference to it, so that its samples go when it goes; its store; its state then
        self._stores: dict[int, tuple[Any, SampleStore, tuple[Any, ...]]] = {}

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """What repeats itself in this dataset and fits into memory."""
        loader = evidence.train_loader
        if loader is None:
            return Refusal("the script trains without a DataLoader")
        if loader.iterable:
            return Refusal("an iterable dataset has no index to keep samples by")
        if loader.probe is None or loader.probe.failed:
            return Refusal(
                f"the dataset could not be asked twice: {loader.probe.failed if loader.probe else 'no probe'}"
            )
        if loader.start_method != "fork" and loader.num_workers:
            return Refusal(f"workers are started by {loader.start_method}, which shares no memory with them")
        if evidence.share(Phase.DATA) < 0.02:
            return Refusal(f"the step waits {percent(evidence.share(Phase.DATA))} of its time for data")
        return cls._choose(evidence, loader, loader.probe)

    @classmethod
    def finding(cls, evidence: Evidence) -> Finding | None:
        """Samples that are made anew in each epoch although they come out the same.

        Rests on the measured wait and on a probe that asked for the same samples twice (Falcon, tip 1; Lin, tip 1).
        """
        loader, choices = evidence.train_loader, cls.settings(evidence)
        if loader is None or loader.probe is None or isinstance(choices, Refusal):
            return None
        (setting,) = choices.settings
        asked = loader.probe
        seconds = asked.sample_seconds if setting == "samples" else asked.loader_seconds
        size = asked.sample_bytes if setting == "samples" else asked.loader_bytes
        whole = max(asked.sample_seconds, seconds)
        kept = "samples" if setting == "samples" else f"what `{asked.loader_function}` gives"
        return timed(
            cls.finds,
            f"the step waits {percent(data_share(evidence))} of its time for samples that are made anew in each epoch, "
            "although the same index gave the same sample each time it was asked",
            f"keep {kept} in memory ({size * (loader.samples or 0) / 2**20:.0f} MiB in all), or store it decoded",
            faster_loading(evidence, loader, max(0.0, seconds - _FAST) / whole),
            HowKnown.ESTIMATED,
            place=loader.where,
            details=("counts from the second epoch on",),
            technique=cls.name,
            setting=toml_value(setting),
            sources=cls.sources,
        )

    @classmethod
    def _choose(cls, evidence: Evidence, loader: LoaderFacts, probe: Probe) -> Choices | Refusal:
        all_repeat = all(other.probe and other.probe.repeatable for other in evidence.loaders if other.role != "unused")
        if probe.repeatable and all_repeat:
            setting, seconds, size = "samples", probe.sample_seconds, probe.sample_bytes
        elif probe.loader_function and probe.loader_repeatable:
            setting, seconds, size = "decoded", probe.loader_seconds, probe.loader_bytes
        elif probe.repeatable is False:
            return Refusal(f"the same index gives other samples, and {loader.dataset} has no `loader` function to keep")
        else:
            return Refusal("not every loader's dataset gives the same sample for the same index")
        if seconds < _FAST:
            return Refusal(f"a sample takes {seconds * 1e6:.0f} us, no more than the cache itself")
        if (need := size * (loader.samples or 0)) > room():
            return Refusal(f"{need / 2**30:.1f} GiB of samples do not fit in half the free memory")
        return Choices((setting,), f"reading a sample takes {seconds * 1e6:.0f} us and gives the same each time")

    def loader_options(self, options: dict[str, Any]) -> None:
        """Make the store before any worker is forked; put it in front of the loader function."""
        from torch.utils.data import IterableDataset

        dataset = options["dataset"]
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            return
        if self.setting == "samples":
            self._store_of(dataset, len(dataset))
            return
        inner = with_loader_function(dataset)
        if inner is None or isinstance(inner.loader, _CachedFunction):
            return
        inner.loader = _CachedFunction(inner.loader, SampleStore(len(inner), room()))
        self.did("dataset")

    def _store_of(self, dataset: Any, samples: int) -> SampleStore:
        kept = self._stores.get(id(dataset))
        state = state_of(dataset)
        if kept is None or kept[2] != state:  # samples kept before a transform was exchanged are no longer true
            gone = functools.partial(_forget, self._stores, id(dataset))
            kept = (weakref.ref(dataset, gone), SampleStore(samples, room()), state)
            self._stores[id(dataset)] = kept
            self.did("dataset")
        return kept[1]

    def fetcher(self, fetcher: Any) -> Any:
        """Take samples from the store."""
        kept = self._stores.get(id(fetcher.dataset))
        if self.setting != "samples" or kept is None or not getattr(fetcher, "auto_collation", False):
            return fetcher
        return _CachedFetcher(fetcher, self._store_of(fetcher.dataset, len(fetcher.dataset)))


class _Audited:
    """A store that is looked over: its first samples, and some later ones, are made again and compared.

    A dataset may read what no look at it shows (a global, a file that changed). One that does is found out within
    the first repeated samples, and is read as ever from then on.
    """

    def __init__(self, store: SampleStore) -> None:
        self._store = store
        self._hits = 0
        self._untrue = False

    def get(self, key: Any, make: Callable[[Any], Any]) -> Any:
        """The sample of a key, kept or made."""
        if self._untrue:
            return make(key)
        sample = self._store.get(key)
        if sample is SampleStore.MISSING:
            sample = make(key)
            self._store.put(key, sample)
            return sample
        self._hits += 1
        if self._hits <= _AUDITED or self._hits % _AUDIT_EVERY == 0:
            anew = make(key)
            if pack(anew) != pack(sample):
                self._untrue = True
                messages.tell(
                    "hasten: sample_cache: the same index gave another sample than before; the dataset is read without "
                    "the cache from here on. Take sample_cache out of the plan.",
                )
            return anew
        return sample


class _CachedFetcher:
    """A fetcher that asks the store first."""

    def __init__(self, fetcher: Any, store: SampleStore) -> None:
        self._fetcher = fetcher
        self._kept = _Audited(store)
        self.dataset = fetcher.dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    def fetch(self, indices: Any) -> Any:
        """What the fetcher behind it gives, each sample read once."""
        return self._fetcher.collate_fn([self._kept.get(index, self.dataset.__getitem__) for index in indices])


class _CachedFunction:
    """A dataset's `loader(path)` behind a store."""

    def __init__(self, function: Any, store: SampleStore) -> None:
        self.function = function
        self._kept = _Audited(store)
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", "loader")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not isinstance(args[0], str | bytes | int):
            return self.function(*args, **kwargs)
        return self._kept.get(args[0], self.function)

    def __reduce__(self) -> Any:
        # A copy in a process that was not forked has no store to share: it gets the plain function.
        return _plain, (self.function,)


def _forget(stores: dict[int, Any], key: int, gone: Any) -> None:
    if key in stores and stores[key][0] is gone:
        del stores[key]


def _plain(function: Any) -> Any:
    return function


def with_loader_function(dataset: Any) -> Any:
    """The dataset, or the one inside its Subsets, that keeps a `loader` function; None when none does."""
    for _ in range(8):
        function = getattr(dataset, "__dict__", {}).get(_LOADER_FUNCTION)
        if callable(function):
            # A method of the dataset may read what changes between epochs; a plain function has only its argument.
            return None if getattr(function, "__self__", None) is dataset else dataset
        dataset = getattr(dataset, "dataset", None)
        if dataset is None:
            return None
    return None


def state_of(dataset: Any) -> tuple[Any, ...]:
    """What of a dataset may be exchanged or changed between epochs, as far as can be seen without reading it all.

    Plain values anywhere inside it, which objects it refers to, the elements of its lists, the contents of its arrays.
    """
    seen: set[int] = set()
    return tuple(_state(part, seen, _DEPTH) for part in (dataset,))


def _state(value: Any, seen: set[int], depth: int) -> Any:
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if id(value) in seen or len(seen) > _MOST or not depth or type(value).__module__.startswith("hasten."):
        return id(value)
    seen.add(id(value))
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return id(value), _checksum(value)
    state: list[Any] = [id(value), _version(value)]  # tensors count their changes
    if isinstance(value, list | tuple | set | dict):
        elements = list(value) if not isinstance(value, dict) else [part for item in value.items() for part in item]
        state.append(hash(tuple(map(id, elements))))
        state += [_state(element, seen, depth - 1) for element in elements] if len(elements) <= _SHORT else []
    elif not isinstance(value, type | ModuleType | FunctionType):
        inside = getattr(value, "__dict__", {})
        state += [(str(key), _state(inside[key], seen, depth - 1)) for key in sorted(inside, key=str)]
    return tuple(state)


def _version(value: Any) -> Any:
    """How often a tensor was changed; tensors made in inference mode do not count."""
    try:
        return getattr(value, "_version", 0)
    except RuntimeError:
        return None


def _checksum(array: Any) -> int:
    """Of an array's contents; of a big one every n-th element's."""
    flat = array.reshape(-1)
    return zlib.crc32(flat[:: max(1, flat.nbytes >> 26)].tobytes()) if not flat.dtype.hasobject else 0
