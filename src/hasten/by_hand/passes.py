"""Passes over a loader that techniques act on: what gathers a batch's samples, and what gives the next batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from hasten.loading import changed, with_techniques
from hasten.run import Run


def with_passes(loader: DataLoader[Any], run: Run) -> DataLoader[Any]:
    """Return the loader with techniques in its passes; the same one where none acts there."""
    in_passes = run.acting("batches") or (run.acting("fetcher") and not loader.num_workers)
    if not in_passes:
        return loader
    loader = changed(loader)
    loader.__dict__["_hasten_run"] = run
    kind: Any = type(loader)
    loader.__class__ = _with_passes(kind)
    return loader


@functools.cache
def _with_passes(kind: Any) -> Any:
    """A class of loaders whose passes begin behind the techniques of a Run."""

    class Passes(kind):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            iterator = super().__iter__()
            run: Run = self._hasten_run
            fetch = with_techniques(iterator, run)
            return _Pass(iterator, fetch) if run.acting("batches") else iterator

    Passes.__name__, Passes.__qualname__, Passes.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Passes


class _Pass:
    """A pass whose next batch comes from techniques; all else is its iterator's."""

    def __init__(self, iterator: Iterator[Any], fetch: Callable[[], Any]) -> None:
        self._iterator, self._fetch = iterator, fetch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._fetch()

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)
