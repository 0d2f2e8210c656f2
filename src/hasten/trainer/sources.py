"""Loaders as one source of batches: several loaders combined, their lengths and limits, and their positions.

`Combined` holds a loader, or a nested list or dict of loaders ("tree"), flat as `leaves`. Each leaf has a `Position`,
which can be saved and resumed; techniques are applied when a pass begins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, SequentialSampler

from hasten.data.loader_facts import is_persistent
from hasten.data.position import Position
from hasten.errors import HastenError
from hasten.loading import changed, with_techniques
from hasten.parallel import set_epoch
from hasten.run import Run
from hasten.trainer.batches import mapped

MODES = ("max_size_cycle", "min_size", "max_size", "sequential")


class Combined:
    """One or several loaders, in nested lists and dicts, drawn from together ("sequential": one after the other).

    Args:
        tree: A loader, or nested lists, tuples and dicts of them.
        mode: "max_size_cycle" (until the longest ends; shorter loaders restart), "min_size" (until the shortest ends),
            "max_size" (until the longest ends; None for loaders that have ended) or "sequential".
    """

    def __init__(self, tree: Any, mode: str) -> None:
        if mode not in MODES:
            raise HastenError(f"unknown mode {mode!r} of combined loaders", f"it must be one of {', '.join(MODES)}")
        self.tree = tree
        self.mode = mode
        self.leaves: list[Any] = _leaves(tree)
        self.limits: list[float] = [math.inf] * len(self.leaves)
        self.positions = [Position(leaf) for leaf in self.leaves]
        self._drawn = [0] * len(self.leaves)

    def replace(self, leaves: list[Any]) -> None:
        """Replace the loaders, keeping the structure of the tree."""
        self.tree = _refilled(self.tree, iter(leaves))
        self.leaves = leaves
        self.positions = [Position(leaf) for leaf in leaves]

    @property
    def single(self) -> bool:
        """Whether there is just one loader, not in a list or dict."""
        return len(self.leaves) == 1 and self.leaves[0] is self.tree

    def batches(self) -> float:
        """Return the number of batches in a pass; infinity when unknown."""
        sizes = [min(length(leaf), limit) for leaf, limit in zip(self.leaves, self.limits, strict=True)]
        if not sizes:
            return 0
        return sum(sizes) if self.mode == "sequential" else min(sizes) if self.mode == "min_size" else max(sizes)

    def begin(self, run: Run, states: list[Any] | None = None) -> Callable[[], Any]:
        """Begin a pass; return the function that fetches its next batch, and raises StopIteration at its end.

        Args:
            run: The Run whose techniques act on the passes.
            states: Positions to resume from (see `state_dict`); None for a new pass.
        """
        starts = [self._opener(i, run, states[i] if states else None) for i in range(len(self.leaves))]
        if self.single:
            fetch = starts[0]()
            if self.limits[0] == math.inf or self.limits[0] >= length(self.leaves[0]):
                return fetch  # the limit cannot be reached: no wrapper per batch
            return _limited(fetch, int(self.limits[0]) - (states[0]["batches"] if states else 0))
        return self._together(starts)

    def _opener(self, index: int, run: Run, state: Any) -> Callable[[], Callable[[], Any]]:
        """Return a function that opens a pass of one loader: the first time at `state`, later from the start."""
        position = self.positions[index]
        resumed = [state]

        def open_one() -> Callable[[], Any]:
            state = resumed.pop() if resumed else None
            resumed_iterator = None if state is None else position.resume(state)
            iterator = position.begin() if resumed_iterator is None else resumed_iterator
            self._drawn[index] = 0 if state is None else state["batches"]
            return with_techniques(iterator, run)

        return open_one

    def _together(self, starts: list[Callable[[], Callable[[], Any]]]) -> Callable[[], Any]:
        """Return the function that fetches one batch of each loader, in the structure of the tree."""
        if self.mode == "sequential":
            raise HastenError(
                'training draws from its loaders together; "sequential" is for validation', "use another mode"
            )
        fetches = [_limited(start(), limit) for start, limit in zip(starts, self.limits, strict=True)]
        over = [False] * len(fetches)

        def fetch_one(index: int) -> Any:
            if not self._drawn[index]:
                # A sampler may draw its seed at its first batch, after other loaders have used random numbers.
                self.positions[index].first()
            try:
                batch = fetches[index]()
            except StopIteration:
                over[index] = True
                if self.mode == "min_size" or all(over):
                    raise
                if self.mode == "max_size":
                    return None
                # "max_size_cycle": a shorter loader starts another pass.
                fetches[index] = _limited(starts[index](), self.limits[index])
                self.positions[index].first()
                batch = fetches[index]()
            self._drawn[index] += 1
            return batch

        def fetch() -> Any:
            if self.mode == "max_size":
                parts = [None if over[index] else fetch_one(index) for index in range(len(fetches))]
                if all(over):
                    raise StopIteration
            else:
                parts = [fetch_one(index) for index in range(len(fetches))]
            return _refilled(self.tree, iter(parts))

        return fetch

    def as_now(self, resumed: dict[str, Any]) -> dict[str, Any]:
        """Convert a saved loop's position to batches as the loaders make them now: of another size, or on other ranks.

        Raises:
            HastenError: Several loaders are drawn from together, and the count of any of them changes.
        """
        states = resumed["positions"]
        if len(states) != len(self.positions):
            return resumed  # `Position.resume` reports the mismatch
        over = [position.batches_over(state) for position, state in zip(self.positions, states, strict=True)]
        if over == [state["batches"] for state in states]:
            return resumed
        if not self.single:
            raise HastenError(
                "several training loaders cannot resume within an epoch with other batch sizes or numbers of ranks",
                "resume with as many ranks and samples in a batch, or from a checkpoint made between epochs",
            )
        return {**resumed, "positions": [{**states[0], "batches": over[0]}], "batch_idx": over[0]}

    def state_dict(self, batches: int) -> list[Any]:
        """Return the positions of a pass after this many batches."""
        drawn = [batches] if self.single else self._drawn
        return [
            {**position.state_dict(count), "batches": count}
            for position, count in zip(self.positions, drawn, strict=True)
        ]


def _limited(fetch: Callable[[], Any], limit: float) -> Callable[[], Any]:
    if limit == math.inf:
        return fetch
    left = [int(limit)]

    def limited() -> Any:
        if not left[0]:
            raise StopIteration
        left[0] -= 1
        return fetch()

    return limited


def _is_collection(tree: Any) -> bool:
    """Return whether a node holds loaders. A list of plain numbers or strings is itself a loader of such batches."""
    if not isinstance(tree, list | tuple | Mapping):
        return False
    parts = tree.values() if isinstance(tree, Mapping) else tree
    return not parts or not all(isinstance(part, int | float | str) for part in parts)


def _leaves(tree: Any) -> list[Any]:
    if not _is_collection(tree):
        return [tree]
    parts = tree.values() if isinstance(tree, Mapping) else tree
    return [leaf for part in parts for leaf in _leaves(part)]


def _refilled(tree: Any, leaves: Iterator[Any]) -> Any:
    if not _is_collection(tree):
        return next(leaves)
    if isinstance(tree, Mapping):
        parts = {key: _refilled(part, leaves) for key, part in tree.items()}
        return parts if type(tree) is dict else type(tree)(parts)  # type: ignore[call-arg]
    if hasattr(tree, "_fields"):
        return type(tree)(*(_refilled(part, leaves) for part in tree))
    return type(tree)(_refilled(part, leaves) for part in tree)


def combined(loaders: Any, mode: str) -> Combined:
    """Return the user's loaders as Combined; a CombinedLoader of another framework keeps its mode."""
    own_mode = getattr(loaders, "_mode", None)
    if own_mode in MODES and hasattr(loaders, "iterables"):
        return Combined(loaders.iterables, own_mode)
    return Combined(loaders, mode)


def length(loader: Any) -> float:
    """Return the number of batches in a pass; infinity when the loader has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return math.inf


def limited(total: float, limit: float | None, flag: str, error: Any = HastenError) -> float:
    """Return the number of batches to use from a loader.

    Args:
        total: Number of its batches; infinity when unknown.
        limit: An int is a number of batches, a float a share of them; None means all.
        flag: The flag's name, for messages.
        error: The exception to raise.
    """
    if limit is None or total == 0:
        return total
    if isinstance(limit, int):
        return min(total, limit)
    if total == math.inf:
        if limit in (0.0, 1.0):
            return 0 if limit == 0.0 else math.inf
        raise error(
            f"a loader has no length (an `IterableDataset`?), so `Trainer({flag})` must be `1.0` or an int,"
            f" not {limit}, which is a share of it"
        )
    count = int(total * limit)
    if not count and limit > 0:
        raise error(
            f"{flag}={limit} of {total} batches is less than one batch", f"at least {flag}={1 / total:.4f}, or an int"
        )
    return count


class NotALoaderError(HastenError, TypeError):
    """Something that is not a loader was given as one; also a TypeError, as Python raises for a wrong type."""


def refuse_batches(tree: Any, name: str) -> None:
    """Raise if a list of batches was given as a loader: its tensors would be taken for loaders."""
    if any(isinstance(leaf, torch.Tensor) for leaf in _leaves(tree)) and _is_collection(tree):
        raise TypeError(
            f"{name} is a {type(tree).__name__} of tensors: lists and dicts are taken for several loaders; for ready"
            " batches give an object that is iterated over, such as DataLoader(batches, batch_size=None)"
        )


def check_iterable(loader: Any, whence: str) -> None:
    """Raise if a loader cannot be iterated over.

    Args:
        loader: The loader.
        whence: Its origin, for the message: "passed to ..." or "returned from ...".
    """
    try:
        if not hasattr(loader, "__iter__"):
            iter(loader)
    except TypeError:
        raise NotALoaderError(
            f"An invalid dataloader was {whence}: {loader!r}", "give something to iterate over, such as a DataLoader"
        ) from None


def overfitting(loader: Any) -> Any:
    """Return a loader that yields the same batches in every pass: a DataLoader without shuffling."""
    if isinstance(loader, DataLoader) and not isinstance(loader.sampler, SequentialSampler):
        return changed(loader, sampler=SequentialSampler(loader.dataset))  # type: ignore[arg-type]
    return loader


def evaluation_batches(source: Combined, limits: list[float], run: Run) -> Iterator[tuple[Any, int, int]]:
    """Yield `(batch, batch_idx, dataloader_idx)` of an evaluation: loaders one after the other, or together."""
    if source.mode == "sequential":
        for index, (leaf, limit) in enumerate(zip(source.leaves, limits, strict=True)):
            if not limit:
                continue
            position = source.positions[index]
            # Persistent workers carry their random states from pass to pass, so a checkpoint needs their position.
            persistent = is_persistent(leaf) and position.loader is leaf
            fetch = _limited(with_techniques(position.begin() if persistent else iter(leaf), run), limit)
            for number in itertools.count():
                try:
                    batch = fetch()
                except StopIteration:
                    break
                yield batch, number, index
            position.end()
        return
    source.limits = limits
    fetch = source.begin(run)
    for number in itertools.count():
        try:
            batch = fetch()
        except StopIteration:
            return
        yield batch, number, 0


__all__ = ["Combined", "combined", "evaluation_batches", "mapped", "set_epoch"]
