"""Apply a Run's techniques to DataLoaders that were already built, for the Trainer and `hasten.setup`.

The taps change a loader's arguments while the script builds it. Here the loader exists, so it is copied with other
attributes instead of being rebuilt.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from hasten.run import Run

# A DataLoader's arguments, which it keeps as attributes of the same names; `shuffle` is missing, since a loader keeps
# it only as the type of its sampler.
_ARGUMENTS = (
    "dataset", "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn",
    "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
    "batch_sampler", "sampler",
)  # fmt: skip


def changed(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a copy of a loader with some attributes changed; a subclass keeps its class and its other attributes."""
    # DataLoader.__setattr__ refuses to change options such as `batch_size` once a loader was built, so `__dict__` is
    # changed. Rebuilding would lose what a subclass adds.
    new: Any = copy.copy(loader)
    new.__dict__.update(attributes)
    if "sampler" in attributes and new.batch_sampler is not None and "batch_sampler" not in attributes:
        batches = new.batch_sampler
        if type(batches) is BatchSampler:
            new.__dict__["batch_sampler"] = BatchSampler(attributes["sampler"], batches.batch_size, batches.drop_last)
        else:
            copied = copy.copy(batches)
            copied.sampler = attributes["sampler"]
            new.__dict__["batch_sampler"] = copied
    new.__dict__["_iterator"] = None  # persistent workers belong to the original loader
    return new  # type: ignore[no-any-return]


def with_options(loader: Any, run: Run) -> Any:
    """Return a loader with the techniques' options applied; the same loader if they change nothing."""
    if not isinstance(loader, DataLoader):
        return loader
    if run.techniques_at("loader_options"):
        options = {name: getattr(loader, name, None) for name in _ARGUMENTS}
        options["shuffle"] = isinstance(loader.sampler, RandomSampler)
        options_wanted = run.loader_options(dict(options))
        if options_wanted["num_workers"] and options_wanted["prefetch_factor"] is None:
            options_wanted["prefetch_factor"] = 2
        different = {name: options_wanted[name] for name in _ARGUMENTS if options_wanted[name] is not options[name]}
        if different:
            loader = changed(loader, **different)
    if run.techniques_at("loader"):
        loader = changed(loader)
        run.loader(loader)
    if loader.num_workers and run.techniques_at("fetcher"):
        loader = changed(loader, worker_init_fn=_FetcherInWorker(run, loader.worker_init_fn))
    return loader


class _FetcherInWorker:
    """A `worker_init_fn` that lets the techniques replace the worker's fetcher, then calls the script's own.

    torch calls `worker_init_fn` right before the worker creates its fetcher, so `create_fetcher` is patched there.
    """

    def __init__(self, run: Run, worker_init_fn: Any) -> None:
        self._run = run
        self._worker_init_fn = worker_init_fn

    def __call__(self, worker: int) -> None:
        from torch.utils.data import _DatasetKind

        create = _DatasetKind.create_fetcher
        run = self._run

        def create_fetcher(*args: Any, **kwargs: Any) -> Any:
            return run.fetcher(create(*args, **kwargs))  # type: ignore[no-untyped-call]

        _DatasetKind.create_fetcher = staticmethod(create_fetcher)  # type: ignore[method-assign]
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker)


def with_techniques(iterator: Iterator[Any], run: Run) -> Callable[[], Any]:
    """Return the function that gives a pass its next batch, wrapped by the techniques that act on batches."""
    fetcher = getattr(iterator, "_dataset_fetcher", None)  # only without workers: a worker has a fetcher of its own
    if fetcher is not None and run.techniques_at("fetcher"):
        iterator._dataset_fetcher = run.fetcher(fetcher)  # type: ignore[attr-defined]
    return run.batches(iterator.__next__, iterator)
