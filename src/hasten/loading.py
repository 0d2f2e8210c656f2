"""Loaders as the techniques of a Run want them, for who has built them before: the Trainer, and `hasten.setup`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from hasten.run import Run

# What a DataLoader is built with, but for `shuffle`, which it keeps as its sampler.
_ARGUMENTS = (
    "dataset", "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn",
    "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
    "batch_sampler", "sampler",
)  # fmt: skip


def changed(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """A copy of a loader with other options; subclasses keep their class and their own attributes."""
    new: Any = copy.copy(loader)
    new.__dict__.update(attributes)
    if "sampler" in attributes and new.batch_sampler is not None and "batch_sampler" not in attributes:
        batches = new.batch_sampler
        if type(batches) is BatchSampler:
            new.__dict__["batch_sampler"] = BatchSampler(attributes["sampler"], batches.batch_size, batches.drop_last)
        else:
            again = copy.copy(batches)
            again.sampler = attributes["sampler"]
            new.__dict__["batch_sampler"] = again
    new.__dict__["_iterator"] = None
    return new  # type: ignore[no-any-return]


def with_options(loader: Any, run: Run) -> Any:
    """A loader as the techniques want it; the same loader where they change nothing."""
    if not isinstance(loader, DataLoader):
        return loader
    if run.acting("loader_options"):
        options = {name: getattr(loader, name, None) for name in _ARGUMENTS}
        options["shuffle"] = isinstance(loader.sampler, RandomSampler)
        wanted = run.loader_options(dict(options))
        if wanted["num_workers"] and wanted["prefetch_factor"] is None:
            wanted["prefetch_factor"] = 2
        different = {name: wanted[name] for name in _ARGUMENTS if wanted[name] is not options[name]}
        if different:
            loader = changed(loader, **different)
    if run.acting("loader"):
        loader = changed(loader)
        run.loader(loader)
    if loader.num_workers and run.acting("fetcher"):
        loader = changed(loader, worker_init_fn=_FetcherInWorker(run, loader.worker_init_fn))
    return loader


class _FetcherInWorker:
    """Lets the techniques change the fetcher that a worker is about to make."""

    def __init__(self, run: Run, then: Any) -> None:
        self._run = run
        self._then = then

    def __call__(self, worker: int) -> None:
        from torch.utils.data import _DatasetKind

        create = _DatasetKind.create_fetcher
        run = self._run

        def create_fetcher(*args: Any, **kwargs: Any) -> Any:
            return run.fetcher(create(*args, **kwargs))  # type: ignore[no-untyped-call]

        _DatasetKind.create_fetcher = staticmethod(create_fetcher)  # type: ignore[method-assign]
        if self._then is not None:
            self._then(worker)


def with_techniques(iterator: Iterator[Any], run: Run) -> Callable[[], Any]:
    """The function that gives a pass its next batch, behind the techniques that act on it."""
    fetcher = getattr(iterator, "_dataset_fetcher", None)
    if fetcher is not None and run.acting("fetcher"):
        iterator._dataset_fetcher = run.fetcher(fetcher)  # type: ignore[attr-defined]
    return run.batches(iterator.__next__, iterator)
