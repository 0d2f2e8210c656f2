"""Whole batches made by threads before they are asked for, as long as that gives what the training would have made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Subset, SubsetRandomSampler
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from hasten.data.ahead import Ahead, ReadFunction
from hasten.data.orders import why_not
from hasten.data.reading_threads import Task
from hasten.data.sample_store import pack


class _Fetch:
    """Makes the batch of a tuple of indices, by a pass's fetcher."""

    def __init__(self, fetcher: Any) -> None:
        self._fetch = fetcher.fetch
        self.__name__ = "fetch"

    def __call__(self, indices: tuple[int, ...]) -> Any:
        return self._fetch(list(indices))


class BatchFunction(ReadFunction):
    """A loader's batches, some of which are there before they are asked for.

    Args:
        fetcher: torch's own, of a pass over the loader.
        threads: How many make them.
        let_go: Told why none is made ahead any more.
        one_thread: Compare with what a worker process would make, which has one of torch's threads.
    """

    takes = (tuple,)
    first = 2

    def __init__(self, fetcher: Any, threads: int, let_go: Callable[[str], None], one_thread: bool) -> None:
        self._made_of = {"dataset": fetcher.dataset, "collate_fn": fetcher.collate_fn}
        self._one_thread = one_thread
        self.ahead = 2 * threads
        super().__init__(_Fetch(fetcher), threads, let_go)

    def is_of(self, loader: Any) -> bool:
        """Whether it makes the batches of this loader as it is now."""
        return self._made_of["dataset"] is loader.dataset and self._made_of["collate_fn"] is loader.collate_fn

    def roots(self) -> dict[str, Any]:
        """What batches depend on."""
        return self._made_of

    def last_batch(self) -> None:
        """Look at everything before the last batch is given: what is large is looked at only now and then in a pass."""
        if not self.over and (found := self._look.changed_at_all()):
            self.end(
                f"{found} changed during a pass, seen only at its end: batches of this pass may not be what they would "
                "have been"
            )

    def _may_give(self, task: Task) -> bool:
        if not self.over and (changed := self._look.changed(list(task.key))):
            seen = ": worker processes would not have seen that, this pass does" if self._one_thread else ""
            self.end(f"{changed} changed during a pass{seen}")
        elif not (self.over or task.failed) and self._look.holds(task.value):
            self.end("its batches have parts that are the dataset's own")
        return super()._may_give(task)

    def _looked_over(self, key: Any) -> Any:
        made = super()._looked_over(key)
        if self.over:
            return made
        if self._look.holds(made):
            self.end("its batches have parts that are the dataset's own")
        elif self._one_thread and self._differs_on_one_thread(key, made):
            self.end("its samples are rounded otherwise where torch has one thread, as in a worker process")
        return made

    def _differs_on_one_thread(self, key: Any, made: Any) -> bool:
        threads = torch.get_num_threads()
        if threads == 1:
            return False
        torch.set_num_threads(1)
        try:
            return pack(self.function(key)) != pack(made)
        finally:
            torch.set_num_threads(threads)


class _WholeBatches:
    """What a pass will ask for: its batches, by their indices."""

    knows = True

    def of_batch(self, batch: Sequence[int]) -> list[Any]:
        return [tuple(batch)]

    def learn(self, indices: Any, keys: Any) -> None:
        """Nothing is to be learnt."""


class _FromThreads:
    """In the place of a pass's fetcher: takes what threads have made."""

    def __init__(self, fetcher: Any, function: BatchFunction) -> None:
        self._fetcher, self._function = fetcher, function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    def fetch(self, indices: Any) -> Any:
        """Return the batch of these indices."""
        return self._function(tuple(indices)) if type(indices) is list else self._fetcher.fetch(indices)


class Threaded:
    """On a loader: its passes are made by threads.

    Args:
        threads: How many.
        let_go: Told why, when they are not any more.
        is_on: Whether passes that begin now shall be.
        begun: Called with each pass that is.
    """

    def __init__(
        self, threads: int, let_go: Callable[[str], None], is_on: Callable[[], bool], begun: Callable[[], None]
    ) -> None:
        self._threads, self._let_go, self._is_on, self._begun = threads, let_go, is_on, begun
        self._function: BatchFunction | None = None

    def iterator(self, loader: Any, plain: Callable[[Any], Any]) -> Any:
        """Return a pass over a loader, made by threads or as `plain` makes it."""
        function = self._function_of(loader) if self._is_on() else None
        if function is None:
            return plain(loader)
        workers = loader.num_workers
        if workers:
            within = copy.copy(loader)
            within.__dict__.update(num_workers=0, prefetch_factor=None)
            iterator: Any = _SingleProcessDataLoaderIter(within)
        else:
            iterator = plain(loader)
            if type(iterator) is not _SingleProcessDataLoaderIter:  # `loader_workers` makes this pass
                return iterator
        ahead = iterator._sampler_iter = Ahead(iterator, function, _WholeBatches())
        iterator._dataset_fetcher = _FromThreads(iterator._dataset_fetcher, function)
        if workers:
            ahead.begin()
        self._begun()
        return iterator

    def _function_of(self, loader: Any) -> BatchFunction | None:
        """What makes the batches of a pass that begins; None where that must be left to torch."""
        known = self._function
        if known is not None and known.over:
            return None
        if known is not None and known.is_of(loader):
            known.look_again()
            return self._usable(known)
        if why := _why_not(loader):
            self._let_go(why)
            return None
        fetcher = _DatasetKind.create_fetcher(
            loader._dataset_kind, loader.dataset, loader._auto_collation, loader.collate_fn, loader.drop_last
        )
        if type(fetcher) is not _MapDatasetFetcher:
            self._let_go("another technique gathers its samples")
            return None
        self._function = BatchFunction(fetcher, self._threads, self._let_go, one_thread=bool(loader.num_workers))
        return self._usable(self._function)

    def _usable(self, function: BatchFunction) -> BatchFunction | None:
        return None if function.over else function

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy in another process has a loader like any other


def threading(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`DataLoader._get_iterator` that looks for a `Threaded` on each loader that begins a pass."""

    def _get_iterator(self: Any) -> Any:
        threaded = self.__dict__.get("_hasten_threaded")
        return plain(self) if threaded is None else threaded.iterator(self, plain)

    return _get_iterator


def _why_not(loader: Any) -> str:
    """Why a pass over a loader cannot be made ahead by threads, or ""."""
    if loader._dataset_kind != _DatasetKind.Map or not loader._auto_collation:
        return "its dataset gives no samples by index, of which a loader makes batches"
    if getattr(loader.dataset, "__getitems__", None) is not None and type(loader.dataset) is not Subset:
        return f"{type(loader.dataset).__name__} gives whole batches of its own (`__getitems__`)"
    sampler = getattr(loader._index_sampler, "hasten_whole", loader._index_sampler)  # a trial cuts it
    if why := why_not(sampler):
        return why
    if isinstance(sampler.sampler, SubsetRandomSampler):
        return "a SubsetRandomSampler's indices may be changed during a pass"
    return ""
